"""The sizes of an indexer (DeepSeek-V3.2, GLM-MoE-DSA), and how config.json gives them."""

from dataclasses import dataclass

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields

MAX_HEADS = 1 << 10  # more than any model has
KINDS = {"F": "full", "S": "shared"}


@dataclass(frozen=True)
class IndexConfig:
    """See tandem.cache.kernels.index_keys."""

    num_heads: int
    head_dim: int  # as wide as the rotated part of a latent entry, and what is not rotated
    top_k: int  # positions that a query attends to
    layers: tuple[int, ...]  # those with an indexer; others attend to what the last of these chose
    interleaved: bool  # its RoPE rotates neighbours, not halves


def read_index(fields: Fields, rotated: int, *, num_heads: int, interleaved: bool, shares: bool) -> IndexConfig:
    """num_heads: where the field is absent. shares: whether some layers may be without an indexer. Raises InvalidConfig
    and UnsupportedFeature."""
    head_dim = fields.integer("index_head_dim", 128, minimum=2)
    if head_dim <= rotated:
        raise UnsupportedFeature(
            f"{fields.source}: index_head_dim is {head_dim}; more than qk_rope_head_dim, {rotated}, is served"
        )
    num_layers = fields.integer("num_hidden_layers", minimum=1)
    return IndexConfig(
        num_heads=fields.integer("index_n_heads", num_heads, minimum=1, maximum=MAX_HEADS),
        head_dim=head_dim,
        top_k=fields.integer("index_topk", 2048, minimum=1),
        layers=_read_layers(fields, num_layers) if shares else tuple(range(num_layers)),
        interleaved=interleaved,
    )


def _read_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """indexer_types, or index_topk_pattern, or a period and where it begins."""
    name = "indexer_types" if "indexer_types" in fields else "index_topk_pattern"
    if name in fields:
        kinds = fields.raw(name)
        if name == "index_topk_pattern" and isinstance(kinds, str):
            kinds = [KINDS.get(letter, letter) for letter in kinds]
        if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in KINDS.values() for kind in kinds):
            raise fields.invalid(name, f"full or shared for each of {num_layers} layers, num_hidden_layers")
        layers = tuple(layer for layer in range(num_layers) if kinds[layer] == "full")
    else:
        period = max(fields.integer("index_topk_freq", 1), 1)
        offset = fields.integer("index_skip_topk_offset", 2)
        layers = tuple(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % period == 0)
    if layers[:1] != (0,):
        raise fields.invalid(name, "full for layer 0, for it has none before it to share with")
    return layers
