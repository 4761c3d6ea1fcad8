"""The quantizations that are served, by config.json's names. It needs no torch, as architectures.py."""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields

# By quant_method, the Method in tandem.workers.weights.formats.
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "fp8": "fp8.FP8_METHOD",
        "mxfp4": "mxfp4.MXFP4_METHOD",
        "awq": "awq.AWQ_METHOD",
        "gptq": "gptq.GPTQ_METHOD",
        "compressed-tensors": "compressed_tensors.COMPRESSED_TENSORS",
        "modelopt": "modelopt.MODELOPT",
    }
)
# By Quantization.weights, the formats there that one checkpoint may mix: see decision 0106. The first has most weights.
FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": ("fp8.FP8", "fp4.FP4"),
        "mxfp4": ("mxfp4.MXFP4",),
        "awq": ("awq.AWQ",),
        "gptq": ("gptq.GPTQ",),
        "gptq_v2": ("gptq.GPTQ_2",),
        "pack-quantized": ("pack_quantized.PACK_QUANTIZED",),
    }
)
# By quant_method, fields that have one accepted value each.
ACCEPTED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"awq": {"bits": 4, "zero_point": True, "version": "gemm"}, "gptq": {"bits": 4}}
)


def read_method(section: Fields) -> str:
    """The quant_method of a quantization_config. Raises UnsupportedFeature for one that is not served, and for a field
    that must have another value with it."""
    method = section.raw("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedFeature(
            f"{section.source}: quant_method is {SHOWN.repr(method)}; it must be "
            f"{' or '.join(map(repr, METHODS))}: take another checkpoint, or one without quantization"
        )
    for name, value in ACCEPTED.get(method, {}).items():
        found = section.raw(name)
        if type(found) is not type(value) or found != value:
            raise UnsupportedFeature(
                f"{section.source}: {name} is {SHOWN.repr(found)}; it must be {value!r} where quant_method is "
                f"{method!r}"
            )
    return method
