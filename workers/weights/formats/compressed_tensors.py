"""Reads llm-compressor's quantization_config: groups of modules, and the KV cache."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.weights.formats.format import BLOCK_SIZES, Method, Quantization, accept, read_block, read_modules
from tandem.workers.weights.formats.int4 import read_group

T = TypeVar("T")
INTEGERS = "pack-quantized"
ACCEPTED_FORMATS = (None, "float-quantized", "naive-quantized", "dense", INTEGERS)
STRATEGIES = ("tensor", "channel", "block")
INT4_STRATEGIES = ("group", "channel")


def _read(section: Fields, served: str) -> Quantization:
    scheme, groups = section.section("kv_cache_scheme"), list(_groups(section))
    if scheme.names():
        _accept_floats(scheme, "KV is stored in FP8")
        accept(scheme, "dynamic", (None, False), served)
    elif not groups:
        raise UnsupportedFeature(f"{section.source} has neither config_groups nor kv_cache_scheme; {served}")
    fp8_kv, unquantized = bool(scheme.names()), read_modules(section, "ignore")
    if not groups:
        return Quantization(unquantized=unquantized, fp8_kv=fp8_kv)
    accept(section, "format", ACCEPTED_FORMATS, served)
    for weights in groups:
        accept(weights, "dynamic", (None, False), served)
    if section.raw("format") == INTEGERS:
        block, zeros = _alike(section, [_read_integers(weights, served) for weights in groups])
        return Quantization(INTEGERS, block, unquantized, fp8_kv, zeros)
    blocks = [_read_floats(weights, served) for weights in groups]
    return Quantization("fp8", _alike(section, [one for one in blocks if one] or [None]), unquantized, fp8_kv)


def _alike(section: Fields, blocks: Sequence[T]) -> T:
    if len(set(blocks)) > 1:
        raise UnsupportedFeature(f"{section.source}: config_groups have unlike block_structures; one is served")
    return blocks[0]


def _groups(section: Fields) -> Iterator[Fields]:
    """The weights of each group. Activations may be asked for in 8 bits, too: here they stay as they are."""
    groups = section.section("config_groups")
    for name in groups.names():
        yield groups.section(name).section("weights")


def _read_floats(weights: Fields, served: str) -> tuple[int, int] | None:
    _accept_floats(weights, served)
    accept(weights, "strategy", STRATEGIES, served)
    if weights.raw("strategy") != "block":
        return None
    if "block_structure" not in weights:
        raise weights.invalid("block_structure", BLOCK_SIZES)
    return read_block(weights, "block_structure")


def _read_integers(weights: Fields, served: str) -> tuple[tuple[int, int] | None, bool]:
    """Returns the block that shares a scale, and whether it has a zero of its own."""
    for name, accepted in (("type", (None, "int")), ("num_bits", (4,)), ("symmetric", (None, True, False))):
        accept(weights, name, accepted, served)
    accept(weights, "strategy", INT4_STRATEGIES, served)
    block = read_group(weights, "group_size") if weights.raw("strategy") == "group" else None
    return block, weights.raw("symmetric") is False


def _accept_floats(section: Fields, reason: str) -> None:
    for name, accepted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        accept(section, name, (None, accepted), reason)


COMPRESSED_TENSORS = Method("compressed-tensors' 8-bit floats and 4-bit integers", _read)
