"""The sizes of attention to a window and to compressed KV, and of hyper-connections (DeepSeek-V4), and how config.json
gives them."""

from dataclasses import dataclass

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
RATES = {SPARSE: 4, HEAVY: 128}
MAX_STREAMS = 64


@dataclass(frozen=True)
class IndexSizes:
    """The sizes of the index keys by which queries choose compressed entries."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class CompressedConfig:
    """Every layer attends to a window of K and V that are the same numbers, and some to compressed entries, too.

    kinds: of each layer one of RATIOS. rates: positions of an entry, by kind. rotated: the last numbers of a head.
    out_groups, out_rank: heads are divided into groups, and each is mapped to so many numbers before all are mixed.
    """

    window: int
    kinds: tuple[str, ...]
    rates: tuple[tuple[str, int], ...]
    index: IndexSizes
    q_rank: int
    rotated: int
    out_groups: int
    out_rank: int

    def every(self, layer: int) -> int | None:
        """Returns positions of an entry; None: the layer has a window alone."""
        return dict(self.rates).get(self.kinds[layer])

    def chooses(self, layer: int) -> bool:
        """Whether the layer's entries overlap, and queries choose among them by index keys."""
        return self.kinds[layer] == SPARSE

    def layers_of(self, *kinds: str) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)

    def input_width(self, layer: int, head_dim: int) -> int:
        """Returns the numbers of a position from which entries, and index keys, are made."""
        return 2 * (head_dim + self.index.head_dim) if self.chooses(layer) else head_dim


@dataclass(frozen=True)
class HyperConfig:
    """The residual is some streams, which learned weights mix (manifold-constrained hyper-connections, 2026)."""

    streams: int
    iterations: int  # of the normalisation of rows and columns
    eps: float

    @property
    def num_weights(self) -> int:
        """The number of weights of one block: to collapse, to expand and to mix the streams."""
        return (2 + self.streams) * self.streams


def read_compressed(fields: Fields, num_layers: int, num_heads: int, head_dim: int) -> CompressedConfig:
    """Raises InvalidConfig and UnsupportedFeature."""
    groups = fields.integer("o_groups", 8, minimum=1)
    if num_heads % groups:
        raise fields.invalid("o_groups", f"a divisor of num_attention_heads, {num_heads}")
    index = IndexSizes(
        num_heads=fields.integer("index_n_heads", 64, minimum=1),
        head_dim=fields.integer("index_head_dim", 128, minimum=2),
        top_k=fields.integer("index_topk", 512, minimum=1),
    )
    rotated = read_rotated(fields, head_dim)
    if rotated > index.head_dim:
        raise fields.invalid("index_head_dim", f"at least the {rotated} rotated numbers of a head")
    return CompressedConfig(
        window=fields.integer("sliding_window", 128, minimum=1),
        kinds=_read_kinds(fields, num_layers),
        rates=tuple(_read_rates(fields).items()),
        index=index,
        q_rank=fields.integer("q_lora_rank", 1024, minimum=1),
        rotated=rotated,
        out_groups=groups,
        out_rank=fields.integer("o_lora_rank", 1024, minimum=1),
    )


def read_hyper(fields: Fields) -> HyperConfig:
    """Raises InvalidConfig."""
    return HyperConfig(
        streams=fields.integer("hc_mult", 4, minimum=1, maximum=MAX_STREAMS),
        iterations=fields.integer("hc_sinkhorn_iters", 20, minimum=1, maximum=1000),
        eps=fields.number("hc_eps", 1e-6),
    )


def read_rotated(fields: Fields, head_dim: int) -> int:
    """The last numbers of a head that are rotated: by partial_rotary_factor, or by qk_rope_head_dim."""
    if "partial_rotary_factor" in fields:
        rotated = int(head_dim * fields.number("partial_rotary_factor"))
    else:
        rotated = fields.integer("qk_rope_head_dim", head_dim // 8)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise fields.invalid("partial_rotary_factor", f"a part of head_dim, {head_dim}, that is even and at least 2")
    return rotated


def read_mlp_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns hash_moe or moe for each layer."""
    kinds = fields.raw("mlp_layer_types")
    if kinds is None:
        hashed = min(fields.integer("num_hash_layers", 3), num_layers)
        return ("hash_moe",) * hashed + ("moe",) * (num_layers - hashed)
    return _checked(fields, "mlp_layer_types", kinds, num_layers, ("hash_moe", "moe"))


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    kinds, ratios = fields.raw("layer_types"), fields.raw("compress_ratios")
    if kinds is not None:
        return _checked(fields, "layer_types", kinds, num_layers, tuple(RATIOS.values()))
    if ratios is not None:
        known = isinstance(ratios, list) and all(isinstance(one, int) and one in RATIOS for one in ratios)
        named = [RATIOS[one] for one in ratios] if known else None
        return _checked(fields, "compress_ratios", named, num_layers, tuple(RATIOS.values()))
    return tuple(HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(num_layers))


def _checked(fields: Fields, name: str, kinds: object, num_layers: int, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(kinds, list) or len(kinds) < num_layers or any(kind not in known for kind in kinds):
        raise fields.invalid(name, f"one of {', '.join(known)} for each of {num_layers} layers, num_hidden_layers")
    return tuple(kinds[:num_layers])


def _read_rates(fields: Fields) -> dict[str, int]:
    given = fields.section("compress_rates")
    other = [name for name in given.names() if name not in RATES]
    if other:
        raise UnsupportedFeature(f"{fields.source}: compress_rates has {SHOWN.repr(other)}; only {', '.join(RATES)}")
    old = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    return {
        kind: fields.integer(old[kind], given.integer(kind, rate, minimum=2), minimum=2) for kind, rate in RATES.items()
    }
