"""What llm-compressor writes into quantization_config: groups of modules, and the KV cache."""

from collections.abc import Iterator

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.weights.formats.format import BLOCK_SIZES, Method, Quantization, accept, read_block, read_modules

ACCEPTED_FORMATS = (None, "float-quantized", "naive-quantized", "dense")
STRATEGIES = ("tensor", "channel", "block")


def _read(section: Fields, served: str) -> Quantization:
    scheme, blocks, groups = section.section("kv_cache_scheme"), set(), list(_groups(section))
    if scheme.names():
        _accept_floats(scheme, "KV is stored in FP8")
        accept(scheme, "dynamic", (None, False), served)
    elif not groups:
        raise UnsupportedFeature(f"{section.source} has neither config_groups nor kv_cache_scheme; {served}")
    if groups:
        accept(section, "format", ACCEPTED_FORMATS, served)
    for weights in groups:
        _accept_floats(weights, served)
        accept(weights, "dynamic", (None, False), served)
        accept(weights, "strategy", STRATEGIES, served)
        if weights.raw("strategy") == "block":
            if "block_structure" not in weights:
                raise weights.invalid("block_structure", BLOCK_SIZES)
            blocks.add(read_block(weights, "block_structure"))
    if len(blocks) > 1:
        raise UnsupportedFeature(f"{section.source}: config_groups have unlike block_structures; one is served")
    unquantized = read_modules(section, "ignore")
    return Quantization("fp8" if groups else None, next(iter(blocks), None), unquantized, bool(scheme.names()))


def _groups(section: Fields) -> Iterator[Fields]:
    """The weights of each group. Activations may be asked for in 8 bits, too: here they stay as they are."""
    groups = section.section("config_groups")
    for name in groups.names():
        yield groups.section(name).section("weights")


def _accept_floats(section: Fields, reason: str) -> None:
    for name, accepted in (("type", "float"), ("num_bits", 8), ("symmetric", True)):
        accept(section, name, (None, accepted), reason)


COMPRESSED_TENSORS = Method("compressed-tensors' 8-bit floats", _read)
