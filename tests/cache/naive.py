"""A cache that keeps K and V of every token by itself and computes in float64, to compare the paged one with."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kernels.base import Index, KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kinds.index import IndexKeys, index_keys
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tandem.cache.plan.spans import ALL, Chunk, Span, span_of
from tests.cache.compressed_inputs import compression_of
from tests.cache.rounding import round_by, round_rows
from tests.support.kinds import changed, has_latents, is_shared, latent_rank
from tests.support.tvm_cache import TvmCache

QUERY_HEADS = 4
HEAD_DIM = 8
LATENT_HEADS = LatentHeads(key_dim=6, value_dim=HEAD_DIM)
INDEX_HEADS = 8
MAX_LENGTH = 64
ROPE = RopeParameters("default", HEAD_DIM, theta=100.0)


def layout_of(*kv_heads: int, page_size: int = 4, dtype: torch.dtype = torch.float32) -> KVLayout:
    """One group for each number of KV heads; layers go round the groups, two in each."""
    groups = len(kv_heads)
    return KVLayout(
        tuple(LayerGroup((index, index + groups), KV(heads, HEAD_DIM)) for index, heads in enumerate(kv_heads)),
        page_size,
        dtype,
    )


def pools_of(layout: KVLayout, num_pages: int) -> tuple[Tensor, ...]:
    """Pools full of NaN: what was never written must not matter. num_pages: of page_size positions; of larger pages a
    few more than cover as many."""
    counts = [num_pages if together == 1 else -(-num_pages // together) + 3 for together in layout.pages_together]
    return tuple(
        torch.full((count, *layout.page_shape(group)), torch.nan, dtype=layout.stored_dtype_of(group))
        for group, count in enumerate(counts)
    )


def ropes_of(layout: KVLayout) -> list[RopeParameters]:
    """ROPE, of the rotated part of the groups with latents."""
    widths = [group.kind.rotated or group.head_dim for group in layout.groups]
    return [replace(ROPE, rotary_dim=width) for width in widths]


def up_projections(rank: int, dtype: torch.dtype = torch.float32) -> UpProjections:
    """The same for every layer."""
    shape = (QUERY_HEADS, LATENT_HEADS.key_dim + LATENT_HEADS.value_dim, rank)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * rank**-0.5
    return UpProjections(weight.to(dtype), LATENT_HEADS)


def choice_of(layout: KVLayout, layer: int, q: Tensor, entries: Tensor) -> Index | None:
    """Returns the choice of a layer with index keys: fixed maps of its tokens' q and of their entries. None without
    index keys."""
    if layer not in index_keys(layout):
        return None
    keys = layout.groups[index_keys(layout)[layer][0]]
    assert isinstance(keys.kind, IndexKeys)
    generator = torch.Generator().manual_seed(layer)
    flat, width = q.flatten(1), keys.head_dim

    def mapped(x: Tensor, size: int) -> Tensor:
        return (x.float() @ torch.randn(x.shape[1], size, generator=generator)) / x.shape[1] ** 0.5

    queries, key, weights = mapped(flat, INDEX_HEADS * width), mapped(entries[:, 0], width), mapped(flat, INDEX_HEADS)
    still, rotated = key.to(q.dtype).split((keys.kind.still, keys.kind.rotated), 1)
    return Index(queries.to(q.dtype).unflatten(1, (INDEX_HEADS, width)), still, rotated, weights)


def hide_others(
    index: Tensor, weights: Tensor, keys: Tensor, hidden: Tensor, top_k: int, *, swapped: bool = False
) -> Tensor:
    """bool [n, N]: `hidden`, and what is not among the top_k best of each row, of equal ones the first. float64: q
    [n, heads, D] of the index, weights [n, heads] and keys [N, D], or [n, N, D].

    swapped: the best that is left out is taken for the worst that is not, where float32 may not tell them apart.
    """
    keys = keys.expand(index.shape[0], -1, -1)
    products = index @ keys.transpose(1, 2)
    scores = (weights.unsqueeze(2) * products.relu()).sum(1).masked_fill(hidden, -torch.inf)
    order = scores.argsort(descending=True, stable=True)
    if swapped and order.shape[1] > top_k:
        border = order[:, top_k - 1 : top_k + 1]
        first, second = scores.gather(1, border).unbind(1)
        near = (first > second) & (first - second <= 2 * score_error(index, weights, keys))
        order[:, top_k - 1] = torch.where(near, border[:, 1], border[:, 0])
    return hidden | torch.ones_like(hidden).scatter(1, order[:, :top_k], False)


def score_error(index: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float64 [n]: how far a float32 score may be from the exact one; arguments as in hide_others, keys [n, N, D].

    A product of D terms, then a sum over heads, of numbers that a rotation has rounded three times each: less than
    D + heads + 8 roundings, each by 2⁻²⁴ of a sum that is at most Σ over heads of |weight| · |q| · |key|.
    """
    roundings = index.shape[2] + index.shape[1] + 8
    sizes = (weights.abs() * index.norm(dim=2)).sum(1) * keys.norm(dim=2).amax(1)
    return sizes * roundings * 2.0**-24


def windowed(layout: KVLayout, *windows: int | None) -> KVLayout:
    """The layout with these windows in its groups."""
    return spanned(layout, *map(span_of, windows))


def spanned(layout: KVLayout, *spans: Span) -> KVLayout:
    """The layout whose groups keep these."""
    groups = zip(layout.groups, spans, strict=True)
    return replace(layout, groups=tuple(changed(group, keeps=keeps) for group, keeps in groups))


def first_seen(span: Span, query: Any) -> Any:
    """The first position that a query at `query`, an integer or integers, sees, by the definition of each span."""
    if isinstance(span, Chunk):
        return query // span.size * span.size
    return query * 0 if span.window is None else query - span.window + 1


def cache_of(
    layout: KVLayout,
    num_pages: int = 32,
    rope: RopeParameters | Sequence[RopeParameters] = ROPE,
    kernels: KernelFactory = choose_kernels,
    scale: float | None = None,
    softcap: float | None = None,
    pools: Sequence[Tensor] | None = None,
    writer: PageWriter | None = None,
    max_length: int = MAX_LENGTH,
) -> TvmCache:
    return TvmCache(
        layout,
        pools or pools_of(layout, num_pages),
        max_sequences=16,
        max_sequence_length=max_length,
        rope=rope,
        writer=writer,
        scale=scale,
        softcap=softcap,
        latent=LATENT_HEADS if has_latents(layout) else None,
        kernels=kernels,
    )


@dataclass
class Inputs:
    """The q, k and v of some tokens in each layer, not rotated. Where latents are kept, k is the entry and v the
    latents. A reader's k and v mean nothing."""

    layers: list[tuple[Tensor, Tensor, Tensor]]

    def between(self, begin: int, end: int) -> "Inputs":
        return Inputs([(q[begin:end], k[begin:end], v[begin:end]) for q, k, v in self.layers])


def draw_inputs(layout: KVLayout, num_tokens: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, width: int = HEAD_DIM) -> Tensor:
        return torch.randn(num_tokens, heads, width, generator=generator).to(layout.dtype)

    def draw_layer(group: LayerGroup) -> tuple[Tensor, Tensor, Tensor]:
        rank = latent_rank(group)
        if rank is None:
            return draw(QUERY_HEADS), draw(group.num_kv_heads), draw(group.num_kv_heads)
        entries = draw(1, group.head_dim)
        q = draw(QUERY_HEADS, LATENT_HEADS.key_dim + group.head_dim - rank)
        return q, entries, entries[:, :, :rank]

    return Inputs([draw_layer(group) for _, group in sorted(groups_by_layer(layout).items())])


def groups_by_layer(layout: KVLayout) -> dict[int, LayerGroup]:
    """Returns the group of each layer. A reader has the group of the layer that it reads."""
    attended = (group for group in layout.groups if group.kind.attended)
    stored = {layer: group for group in attended for layer in group.layers}
    return stored | {layer: stored[of] for layer, of in layout.readers}


def run(
    cache: TvmCache,
    seq_ids: list[int],
    lengths: list[int],
    inputs: Inputs,
    sinks: Tensor | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    *,
    push: bool = True,
) -> list[Tensor]:
    """One forward through the paged cache; o of each layer. parents: token_tree_parents."""
    with torch.inference_mode():
        plan = cache.begin_forward(seq_ids, lengths, token_tree_parents=parents, push=push)
        outputs = [run_layer(cache, plan, layer, *tensors, sinks) for layer, tensors in enumerate(inputs.layers)]
        cache.end_forward(plan)
    return outputs


def run_layer(
    cache: TvmCache, plan: Forward, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    group = groups_by_layer(cache.layout)[layer]
    rank = latent_rank(group)
    if layer in dict(cache.layout.readers):
        return cache.read(plan, layer, q, sinks)
    if is_shared(group):
        assert sinks is not None
        return cache.shared_attention(plan, layer, q, k, sinks, compression_of(cache.layout, layer, q, k))
    if rank is None:
        return cache.attention(plan, layer, q, k, v, sinks)
    keys = k[:, 0, rank:].clone()  # what latent_attention is given it may overwrite
    choice = choice_of(cache.layout, layer, q, k)
    return cache.latent_attention(plan, layer, q.clone(), v[:, 0].clone(), keys, up_projections(rank, q.dtype), choice)


@dataclass
class NaiveSequence:
    """keys and values: per layer [tokens, heads, head_dim] float64, keys rotated; entries and latents as in Inputs."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        return self.keys[0].shape[0]


@dataclass
class NaiveCache:
    """rope: one for all groups of the layout, or one for each. All of a sequence is kept, whatever the windows are."""

    layout: KVLayout
    rope: RopeParameters | Sequence[RopeParameters] = ROPE
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    sequences: dict[int, NaiveSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = [self.rope] * len(self.layout.groups) if isinstance(self.rope, RopeParameters) else self.rope
        self._rotaries: dict[int, RotaryEmbedding | None] = {}
        self._spans: dict[int, Span] = {}
        self._ranks = {layer: latent_rank(group) for layer, group in groups_by_layer(self.layout).items()}
        self._readers = dict(self.layout.readers)
        for group, rope in zip(self.layout.groups, kinds, strict=True):
            embedding = RotaryEmbedding(rope, MAX_LENGTH, "cpu", torch.float64) if rope.rope_type != "none" else None
            self._rotaries.update(dict.fromkeys(group.layers, embedding))
            self._spans.update(dict.fromkeys(group.layers, group.keeps))
        for layer, source in self._readers.items():
            self._rotaries[layer], self._spans[layer] = self._rotaries[source], self._spans[source]

    def add(self, sequence: int) -> None:
        groups = [group for _, group in sorted(groups_by_layer(self.layout).items())]
        keys = [torch.empty(0, group.num_kv_heads, group.head_dim, dtype=torch.float64) for group in groups]
        values = [k[:, :, : latent_rank(group)] for k, group in zip(keys, groups, strict=True)]
        self.sequences[sequence] = NaiveSequence(keys, values)

    def remove(self, sequence: int) -> None:
        del self.sequences[sequence]

    def fork(self, parent: int, child: int, length: int) -> None:
        of = self.sequences[parent]
        self.sequences[child] = NaiveSequence([k[:length] for k in of.keys], [v[:length] for v in of.values])

    def pop(self, sequence: int, count: int) -> None:
        self.fork(sequence, sequence, self.sequences[sequence].length - count)

    def run(self, seq_ids: list[int], lengths: list[int], inputs: Inputs) -> list[Tensor]:
        """One forward; o [tokens, heads, head_dim] float64 of each layer."""
        outputs = [torch.empty(q.shape[0], QUERY_HEADS, HEAD_DIM, dtype=torch.float64) for q, _, _ in inputs.layers]
        begin = 0
        for sequence, count in zip(seq_ids, lengths, strict=True):
            rows = slice(begin, begin + count)
            start = self.sequences[sequence].length
            for layer, (q, k, v) in enumerate(inputs.layers):
                outputs[layer][rows] = self._attend(sequence, layer, start, q[rows], k[rows], v[rows])
            begin += count
        return outputs

    def _attend(self, sequence: int, layer: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of = self.sequences[sequence]
        positions, source = torch.arange(start, start + q.shape[0]), self._readers.get(layer, layer)
        if source == layer:
            keys, values = self._stored(layer, self._rotated(layer, k.double(), positions), v.double())
            of.keys[layer] = torch.cat((of.keys[layer], keys))
            of.values[layer] = torch.cat((of.values[layer], values))
        keys, values = of.keys[source], of.values[source]
        rank = self._ranks[layer]
        if rank is not None:
            keys, values = expand_latents(keys, rank)
        return attend(
            self._rotated(layer, q.double(), positions),
            keys,
            values,
            span=self._spans[layer],
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
        )

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the layout's entries keep of k and v [n, heads, dim]."""
        scales, rank = self.layout.scales, self._ranks[layer]
        if scales is None:
            return k, v
        if rank is not None:
            k = round_rows(k, rank)
            return k, k[:, :, :rank]
        return round_by(k, scales.k[layer]), round_by(v, scales.v[layer])

    def _rotated(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        rotary = self._rotaries[layer]
        if rotary is None:
            return x
        cos, sin = (factor.double()[:, None] for factor in rotary.cos_sin(positions))
        still, x = x.split((x.shape[-1] - cos.shape[-1], cos.shape[-1]), -1)  # of latents, only the last is rotated
        first, second = x.chunk(2, -1)
        return torch.cat((still, x * cos + torch.cat((-second, first), -1) * sin), -1)


def expand_latents(entries: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """K and V of every head, one by one, of entries [N, 1, rank + rotated]."""
    latents, rotated = entries.split((rank, entries.shape[2] - rank), 2)
    keys, values = [], []
    for weight in up_projections(rank).weight.double():
        made = latents @ weight.T
        keys.append(torch.cat((made[:, :, : LATENT_HEADS.key_dim], rotated), 2))
        values.append(made[:, :, LATENT_HEADS.key_dim :])
    return torch.cat(keys, 1), torch.cat(values, 1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    span: Span = ALL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention with all scores at once: q [n, q heads, D] belong to the last n of N keys and values [N, kv heads, D].
    Not causal: they see all keys. positions: int64 [N], of keys in the text, by which the span goes; None: 0, 1, ….
    """
    group, length, count = q.shape[1] // keys.shape[1], keys.shape[0], q.shape[0]
    scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1))
    scores *= q.shape[2] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    own, others = torch.arange(length - count, length)[:, None], torch.arange(length)
    if positions is not None:
        own, others = positions[length - count :, None], positions
    hidden = ((others > own) & causal) | (others < first_seen(span, own))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores)[:, None, None].expand(-1, count, 1)), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))


def assert_same_kv(first: TvmCache, second: TvmCache, sequence: int, other: int, begin: int, end: int) -> None:
    """Bit for bit."""
    pairs = zip(first.gather_kv(sequence, begin, end), second.gather_kv(other, begin, end), strict=True)
    for (k, v), (other_k, other_v) in pairs:
        assert torch.equal(k, other_k)
        assert torch.equal(v, other_v)
