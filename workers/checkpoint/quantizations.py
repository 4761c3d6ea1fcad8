"""The quantizations that are served, by config.json's names. It needs no torch, as architectures.py."""

from collections.abc import Mapping
from types import MappingProxyType

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
