"""Inputs of a layer with compressed KV, made of its q and k, and its expected outputs by loops in float64."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.base import Compression, IndexQuery
from tandem.cache.kinds.compressed import CompressedGroups, compressed_groups
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding

Array = NDArray[np.float64]
INDEX_HEADS = 32  # so that no two scores of a query are 0
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """every, overlap: of entries. widths: of an entry, and of an index key where there are."""

    every: int
    overlap: bool
    widths: tuple[int, ...]
    top_k: int | None

    @classmethod
    def of(cls, layout: KVLayout, groups: CompressedGroups) -> "Sizes":
        made = [layout.groups[index] for index in (groups.entries, groups.keys) if index is not None]
        every, window = made[0].keeps.every, layout.groups[groups.inputs].keeps.window
        return cls(every, window == 2 * every, tuple(group.head_dim for group in made), groups.top_k)

    @property
    def width(self) -> int:
        return (1 + self.overlap) * sum(self.widths)


def draw(layer: int, what: int, *shape: int) -> Array:
    """The same for the same arguments; float32 values."""
    return np.random.default_rng([layer, what]).standard_normal(shape).astype(np.float32).astype(np.float64)


def compression_of(layout: KVLayout, layer: int, q: Tensor, k: Tensor) -> Compression | None:
    """q [T, heads, D] and k [T, 1, D] of tokens. None: the layer has a window alone."""
    groups = compressed_groups(layout).get(layer)
    if groups is None:
        return None
    sizes, query = Sizes.of(layout, groups), None
    maps = [torch.from_numpy(draw(layer, what, k.shape[2], sizes.width)).float() for what in (0, 1)]
    values, gates = (k[:, 0].float() @ one for one in maps)
    if len(sizes.widths) == 2:
        maps = [draw(layer, 2, q.shape[2], INDEX_HEADS * sizes.widths[1]), draw(layer, 3, q.shape[2], INDEX_HEADS)]
        index_q, weights = (q[:, 0].float() @ torch.from_numpy(one).float() for one in maps)
        query = IndexQuery(index_q.unflatten(1, (INDEX_HEADS, sizes.widths[1])), weights)
    bias = torch.from_numpy(draw(layer, 4, sizes.every, sizes.width)).float()
    norms = tuple(torch.from_numpy(draw(layer, 5, width)).float() for width in sizes.widths)
    return Compression(values, gates, bias, norms, EPS, query)


class SharedOracle:
    """One layer whose K and V are the same numbers. q [tokens, heads, D], kv [tokens, 1, D]: of every kind of token."""

    def __init__(
        self, layout: KVLayout, layer: int, q: Array, kv: Array, rope: RopeParameters, sinks: Array, positions: int
    ) -> None:
        group = layout.groups[layout.layer_index[layer][0]]
        window, groups = group.keeps.window, compressed_groups(layout).get(layer)
        assert window is not None
        self._window, self._q, self._kv, self._sinks = window, q, kv[:, 0], sinks
        table = RotaryEmbedding(rope, positions, "cpu", torch.float64).rotation(torch.arange(positions))
        half = rope.rotary_dim // 2
        self._factors = table.cos[:, 0, :half].numpy() + 1j * table.signed_sin[:, 0, half:].numpy()
        self._sizes = None if groups is None else Sizes.of(layout, groups)
        self.given = compression_of(layout, layer, *(torch.from_numpy(x.astype(np.float32)) for x in (q, kv)))
        self.kept, self._entry = cache(self._keep), cache(self._make_entry)

    def turn(self, x: Array, position: int, *, back: bool = False) -> Array:
        """x [..., D], whose last numbers are complex ones."""
        factors = self._factors[position].conj() if back else self._factors[position]
        size = 2 * factors.size
        numbers = (x[..., -size::2] + 1j * x[..., 1 - size :: 2]) * factors
        turned = np.stack((numbers.real, numbers.imag), -1).reshape(*x.shape[:-1], size)
        return np.concatenate((x[..., :-size], turned), -1)

    def _keep(self, token: int, position: int) -> Array:
        """[D]: what the window keeps of a token."""
        return self.turn(self._kv[token], position)

    def output(self, text: list[int]) -> Array:
        """o [heads, D] of the last token of a text that begins at position 0."""
        last = len(text) - 1
        keys = [self.kept(text[at], at) for at in range(max(last - self._window + 1, 0), last + 1)]
        keys = np.array(keys + self._seen(text))
        scores = self.turn(self._q[text[last]], last) @ keys.T * keys.shape[1] ** -0.5
        weights = np.exp(scores)
        weights /= weights.sum(1, keepdims=True) + np.exp(self._sinks)[:, None]
        return self.turn(weights @ keys, last, back=True)

    def _seen(self, text: list[int]) -> list[Array]:
        if self._sizes is None or self.given is None:
            return []
        entries = self.entries(text, 0)
        if self._sizes.top_k is None or len(entries) <= self._sizes.top_k:
            return entries
        assert self.given.query is not None
        q, weights = (x[text[-1]].double().numpy() for x in self.given.query)
        scores = np.maximum(self.turn(q, len(text) - 1) @ np.array(self.entries(text, 1)).T, 0)
        best = np.argsort(-(weights @ scores), kind="stable")[: self._sizes.top_k]
        return [entries[index] for index in sorted(best)]

    def entries(self, text: list[int], kind: int) -> list[Array]:
        """All that the text completes: entries (0) or index keys (1)."""
        assert self._sizes is not None
        every, before = self._sizes.every, self._sizes.every * self._sizes.overlap
        firsts = range(0, len(text) - every + 1, every)
        return [self._entry(tuple(text[max(first - before, 0) : first + every]), first, kind) for first in firsts]

    def _make_entry(self, ids: tuple[int, ...], first: int, kind: int) -> Array:
        """ids: of the positions from which the entry is made. The last `every` are its own."""
        sizes, given = self._sizes, self.given
        assert sizes is not None
        assert given is not None
        size, begin = sizes.widths[kind], (1 + sizes.overlap) * sum(sizes.widths[:kind])
        values, gates = [], []
        for at, token in enumerate(ids):
            own = at >= len(ids) - sizes.every
            columns = slice(begin + size * (own and sizes.overlap), begin + size * (1 + (own and sizes.overlap)))
            values.append(given.values[token, columns].double().numpy())
            gate = given.gates[token] + given.bias[(first - len(ids) + sizes.every + at) % sizes.every]
            gates.append(gate[columns].double().numpy())
        weights = np.exp(gates)
        pooled = (np.array(values) * weights).sum(0) / weights.sum(0)
        normed = pooled / np.sqrt((pooled**2).mean() + EPS) * given.norms[kind].double().numpy()
        return self.turn(normed, first)
