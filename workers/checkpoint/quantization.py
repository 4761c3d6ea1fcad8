"""How a checkpoint's weights are quantized, as quantization_config says it. They are dequantized while they load."""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields

METHODS = ("fp8", "mxfp4", "compressed-tensors")
SERVED = "weights are served in fp8, mxfp4 and compressed-tensors' 8-bit floats"
FORMATS = (None, "float-quantized", "naive-quantized", "dense")  # of compressed-tensors
STRATEGIES = ("tensor", "channel", "block")
MAX_BLOCK = 1 << 16
BLOCK_SIZES = f"two integers from 1 to {MAX_BLOCK}"


@dataclass(frozen=True)
class Quantization:
    """What quantization_config says about weights and KV."""

    weights: str | None = None  # "fp8", "mxfp4"; None: they are stored as they are computed with
    block: tuple[int, int] | None = None  # rows and columns that share a scale, where a scale is of a block
    fp8_kv: bool = False  # K and V are asked for in 8 bits


AS_COMPUTED = Quantization()


def read_quantization(fields: Fields) -> Quantization:
    """quantization_config. Raises InvalidConfig, and UnsupportedFeature where it asks for something else."""
    if "quantization_config" not in fields:
        return AS_COMPUTED
    section = fields.section("quantization_config")
    method = section.raw("quant_method")
    if method not in METHODS:
        raise UnsupportedFeature(
            f"{section.source}: quant_method is {SHOWN.repr(method)}; it must be {_either(METHODS)}, for {SERVED}: "
            "take another checkpoint of the model, or one without quantization"
        )
    if method == "mxfp4":
        return Quantization("mxfp4")
    if method == "fp8":
        _accept(section, "fmt", (None, "e4m3"))
        return Quantization("fp8", _read_block(section, "weight_block_size"))
    return _read_compressed_tensors(section)


def _read_compressed_tensors(section: Fields) -> Quantization:
    """llm-compressor's sections: groups of modules, and the KV cache."""
    scheme, blocks, groups = section.section("kv_cache_scheme"), set(), list(_groups(section))
    if scheme.names():
        _accept_floats(scheme, "KV is stored in FP8")
        _accept(scheme, "dynamic", (None, False))
    elif not groups:
        raise UnsupportedFeature(f"{section.source} has neither config_groups nor kv_cache_scheme; {SERVED}")
    if groups:
        _accept(section, "format", FORMATS)
    for weights in groups:
        _accept_floats(weights, SERVED)
        _accept(weights, "dynamic", (None, False))
        _accept(weights, "strategy", STRATEGIES)
        if weights.raw("strategy") == "block":
            if "block_structure" not in weights:
                raise weights.invalid("block_structure", BLOCK_SIZES)
            blocks.add(_read_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise UnsupportedFeature(f"{section.source}: config_groups have unlike block_structures; one is served")
    return Quantization("fp8" if groups else None, next(iter(blocks), None), fp8_kv=bool(scheme.names()))


def _groups(section: Fields) -> Iterator[Fields]:
    """The weights of each group. Activations may be asked for in 8 bits, too: here they stay as they are."""
    groups = section.section("config_groups")
    for name in groups.names():
        yield groups.section(name).section("weights")


def _accept_floats(section: Fields, reason: str) -> None:
    for name, accepted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        _accept(section, name, (None, accepted), reason)


def _accept(section: Fields, name: str, accepted: tuple[object, ...], reason: str = SERVED) -> None:
    value = section.raw(name)
    if not any(type(value) is type(one) and value == one for one in accepted):
        shown, listed = SHOWN.repr(value), _either(accepted)
        raise UnsupportedFeature(f"{section.source}: {name} is {shown}; it must be {listed}, for {reason}")


def _either(accepted: tuple[object, ...]) -> str:
    return " or ".join(repr(one) for one in accepted if one is not None)


def _read_block(section: Fields, name: str) -> tuple[int, int] | None:
    value = section.raw(name)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= MAX_BLOCK for size in sizes):
        raise section.invalid(name, BLOCK_SIZES)
    return sizes[0], sizes[1]
