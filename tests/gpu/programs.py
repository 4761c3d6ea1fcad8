"""Forwards through a paged cache on a GPU, beside attention in float64 over plain tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tandem.cache.plan.spans import span_of
from tests.support.tvm_cache import TvmCache

NUM_LAYERS = 2
MAX_LENGTH = 1024

Inputs = list[tuple[Tensor, Tensor, Tensor]]
"""For each layer q, k and v, views of one projection's rows."""


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int | None = None
    softcap: float | None = None
    scales: KVScales | None = None

    @property
    def layout(self) -> KVLayout:
        group = LayerGroup(tuple(range(NUM_LAYERS)), KV(self.kv_heads, self.head_dim, span_of(self.window)))
        return KVLayout((group,), self.page_size, self.dtype, self.scales)

    @property
    def rope(self) -> RopeParameters:
        return RopeParameters("default", self.head_dim)

    def pool(self, num_pages: int = 300) -> Tensor:
        """Full of NaN: what was never written must not matter."""
        shape = (num_pages, *self.layout.page_shape(0))
        return torch.full(shape, torch.nan, device="cuda").to(self.layout.stored_dtype)

    def cache(self, pool: Tensor, writer: PageWriter | None = None) -> TvmCache:
        return TvmCache(
            self.layout,
            (pool,),
            max_sequences=16,
            max_sequence_length=MAX_LENGTH,
            rope=self.rope,
            writer=writer,
            softcap=self.softcap,
        )

    def draw(self, num_tokens: int, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        heads = (self.q_heads, self.kv_heads, self.kv_heads)

        def rows() -> tuple[Tensor, Tensor, Tensor]:
            drawn = torch.randn(num_tokens, sum(heads), self.head_dim, generator=generator, device="cuda")
            q, k, v = drawn.to(self.dtype).split(heads, 1)
            return q, k, v

        return [rows() for _ in range(NUM_LAYERS)]


@torch.inference_mode()
def run(
    cache: TvmCache,
    appends: Mapping[int, int],
    inputs: Inputs,
    sinks: Tensor | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
) -> list[Tensor]:
    """One forward; o of each layer. parents: token_tree_parents."""
    plan = cache.begin_forward(list(appends), list(appends.values()), token_tree_parents=parents)
    outputs = [cache.attention(plan, layer, q, k, v, sinks) for layer, (q, k, v) in enumerate(inputs)]
    cache.end_forward(plan)
    return outputs


class Reference:
    """The same forwards in float64. K and V of each sequence and layer, [tokens, kv heads, head_dim], K rotated."""

    def __init__(self, shape: Shape, sinks: Tensor | None = None) -> None:
        self._shape = shape
        self._sinks = sinks
        self._rotary = RotaryEmbedding(shape.rope, MAX_LENGTH, "cuda", torch.float64)
        self._fp8 = Fp8Entries.of_group(shape.layout, 0, torch.device("cuda"))
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def run(self, appends: Mapping[int, int], inputs: Inputs) -> list[Tensor]:
        counts = list(appends.values())
        outputs = []
        for layer, (q, k, v) in enumerate(inputs):
            parts = zip(appends, q.split(counts), k.split(counts), v.split(counts), strict=True)
            outputs.append(torch.cat([self._attend((sequence, layer), *part) for sequence, *part in parts]))
        return outputs

    def fork(self, parent: int, child: int, position: int) -> None:
        for layer in range(NUM_LAYERS):
            k, v = self._kept[parent, layer]
            self._kept[child, layer] = k[:position], v[:position]

    def _attend(self, place: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = self._kept[place][0].shape[0] if place in self._kept else 0
        rotation = self._rotary.rotation(torch.arange(begin, begin + q.shape[0]))
        q, k, v = rotation.apply(q.double()), rotation.apply(k.double()), v.double()
        if self._fp8 is not None:
            entries = self._fp8.quantise(place[1], k.to(self._shape.dtype), v)
            k, v = (
                x.double() * scales.double()[:, None]
                for x, scales in zip(entries, self._fp8.scales[place[1]], strict=True)
            )
        if begin:
            k, v = torch.cat((self._kept[place][0], k)), torch.cat((self._kept[place][1], v))
        self._kept[place] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        if self._shape.softcap is not None:
            scores = self._shape.softcap * torch.tanh(scores / self._shape.softcap)
        others = torch.arange(k.shape[0], device="cuda")
        own = others[begin:, None]
        visible = (others <= own) & (others > own - (self._shape.window or MAX_LENGTH))
        scores = scores.masked_fill(~visible, -torch.inf)
        if self._sinks is not None:
            scores = torch.cat((scores, self._sinks.double()[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, values)
