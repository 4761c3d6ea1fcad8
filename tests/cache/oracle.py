"""Computes what a cache must compute from one id for each token, from which its q, k and v follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kinds.compressed import compressed_groups
from tandem.cache.kinds.index import IndexKeys, index_keys
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tests.cache.compressed_inputs import SharedOracle
from tests.cache.naive import LATENT_HEADS, choice_of, expand_latents, first_seen, hide_others
from tests.cache.rounding import round_rows
from tests.support.kinds import has_latents, is_beside, is_shared, latent_rank
from tests.support.tvm_cache import TvmCache

NUM_TOKENS = 512  # kinds of tokens
MAX_POSITIONS = 64

Ids = Sequence[int]


@dataclass(frozen=True)
class Setting:
    """The parts of a program's caches. positions: of a pool. streams: the share of sequences that slide."""

    layout: KVLayout
    rope: RopeParameters
    positions: int = 80
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    kernels: KernelFactory = choose_kernels
    streams: float = 0.3

    @property
    def ropes(self) -> list[RopeParameters]:
        """The RoPE of each group: of the shared part of K where it has latents."""
        groups = self.layout.groups
        widths = [group.kind.rotated or group.head_dim for group in groups]
        return [
            self.rope if is_beside(group) or is_shared(group) else replace(self.rope, rotary_dim=width)
            for group, width in zip(groups, widths, strict=True)
        ]


def cache_of(setting: Setting, pools: tuple[Tensor, ...], writer: PageWriter, max_sequences: int) -> TvmCache:
    return TvmCache(
        setting.layout,
        pools,
        max_sequences=max_sequences,
        max_sequence_length=MAX_POSITIONS,
        rope=setting.ropes,
        writer=writer,
        softcap=setting.softcap,
        latent=LATENT_HEADS if has_latents(setting.layout) else None,
        kernels=setting.kernels,
    )


class Oracle:
    """For each layer q, k and v of every token, float32 values in float64, and k rotated for every position.

    Where latents are kept, k is the entry and v the latent.
    """

    def __init__(self, setting: Setting, num_q_heads: int) -> None:
        generator = np.random.default_rng(0)
        layout = setting.layout
        self._softcap = setting.softcap
        self._sinks = None if setting.sinks is None else np.array(setting.sinks)
        self.num_layers = layout.num_layers
        of_layers = {layer: group for layer, (group, _) in layout.layer_index.items()}
        self._groups = [layout.groups[of_layers[layer]] for layer in range(self.num_layers)]
        self._ropes = [setting.ropes[of_layers[layer]] for layer in range(self.num_layers)]

        def draw(heads: int, width: int) -> NDArray[np.float64]:
            return generator.standard_normal((NUM_TOKENS, heads, width)).astype(np.float32).astype(np.float64)

        still = [0 if latent_rank(group) is None else LATENT_HEADS.key_dim for group in self._groups]
        rotated = [
            group.head_dim if is_shared(group) else rope.rotary_dim
            for group, rope in zip(self._groups, self._ropes, strict=True)
        ]
        self.q = [draw(num_q_heads, sum(widths)) for widths in zip(still, rotated, strict=True)]
        self.k = [draw(group.num_kv_heads, group.head_dim) for group in self._groups]
        self.v = [
            draw(group.num_kv_heads, group.head_dim) if latent_rank(group) is None else k[:, :, : latent_rank(group)]
            for group, k in zip(self._groups, self.k, strict=True)
        ]
        for layer, of in layout.readers:
            self.k[layer], self.v[layer] = self.k[of], self.v[of]
        self.rotated_q, self.rotated_k = (
            [rotate_everywhere(x, rope) for x, rope in zip(of, self._ropes, strict=True)] for of in (self.q, self.k)
        )
        self.stored_k, self.stored_v = self.k, self.v
        if layout.scales is not None:
            ranks = [latent_rank(group) for group in self._groups]
            self.rotated_k = [_rounded(k, rank) for k, rank in zip(self.rotated_k, ranks, strict=True)]
            self.stored_k = [_rounded(k, rank) for k, rank in zip(self.k, ranks, strict=True)]
            self.stored_v = [_rounded(v, rank) for v, rank in zip(self.v, ranks, strict=True)]
        self.beside = {
            (number, layer): EntryOracle.of(group, generator)
            for number, group in enumerate(layout.groups)
            for layer in (group.layers if is_beside(group) else ())
            if layer not in compressed_groups(layout)
        }
        self.shared = {}
        for layer, group in enumerate(self._groups):
            if is_shared(group):
                assert self._sinks is not None
                of_layer = self.q[layer], self.k[layer], self._ropes[layer], self._sinks
                self.shared[layer] = SharedOracle(layout, layer, *of_layer, MAX_POSITIONS)
        self.index = {
            layer: IndexOracle.of(setting, layer, self.q[layer], self.k[layer]) for layer in index_keys(layout)
        }

    def inputs(self, ids: Ids) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Returns for each layer q, k and v of a forward's tokens."""
        index = np.array(ids)
        return [
            tuple(torch.from_numpy(x[layer][index].astype(np.float32)) for x in (self.q, self.k, self.v))
            for layer in range(self.num_layers)
        ]  # type: ignore[misc]  # a tuple of three

    def outputs(self, texts: Sequence[Ids], seen: Sequence[Ids], *, swapped: bool = False) -> list[NDArray[np.float64]]:
        """Returns for each layer o [n, num_q_heads, head_dim] of the last token of each text, whose tokens stand at
        positions 0, 1, … swapped: see hide_others."""
        lengths = np.array([len(text) for text in texts])
        longest = int(lengths.max())
        ids = np.zeros((len(texts), longest), np.int64)
        places = np.zeros_like(ids)
        for row, place, text, its in zip(ids, places, texts, seen, strict=True):
            row[: len(text)], place[: len(text)] = text, its
        positions = np.arange(longest)
        last, query = (array[np.arange(len(texts)), lengths - 1] for array in (ids, places))
        outputs, chooser = [], None
        for layer, group in enumerate(self._groups):
            if layer in self.shared:
                outputs.append(np.stack([self.shared[layer].output(list(text)) for text in texts]))
                continue
            hidden = (positions >= lengths[:, None]) | (places < first_seen(group.keeps, query[:, None]))
            q = self.rotated_q[layer][last, lengths - 1]
            chooser = self.index.get(layer, chooser)
            rank = latent_rank(group)
            if chooser is not None and rank is not None:
                hidden = chooser.hide(hidden, ids, last, lengths - 1, swapped)
            k, v = self.rotated_k[layer][ids, positions], self.v[layer][ids]
            if rank is not None:
                made = expand_latents(torch.from_numpy(k).flatten(0, 1), rank)
                k, v = (x.unflatten(0, k.shape[:2]).numpy() for x in made)
            outputs.append(self._attend(q, k, v, hidden))
        return outputs

    def _attend(
        self, q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], hidden: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """q [n, q heads, D], k and v [n, m, kv heads, D or, of v, another], hidden [n, m]."""
        grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[2])
        scores = grouped @ k.transpose(0, 2, 3, 1) * q.shape[2] ** -0.5
        if self._softcap is not None:
            scores = self._softcap * np.tanh(scores / self._softcap)
        scores = np.where(hidden[:, None, None], -np.inf, scores)
        extra = 0.0 if self._sinks is None else np.exp(self._sinks).reshape(1, k.shape[2], -1, 1)
        weights = np.exp(scores)
        weights /= weights.sum(-1, keepdims=True) + extra
        return (weights @ v.transpose(0, 2, 1, 3)).reshape(*q.shape[:2], -1)


@dataclass(frozen=True)
class EntryOracle:
    """Entries that a layer keeps beside its K and V, and that a cache is given. k and v of an entry follow from the id
    of the token that completes it. numbers: float64 [tokens, planes, heads, dim]."""

    numbers: NDArray[np.float64]
    every: int
    dtype: torch.dtype

    @classmethod
    def of(cls, group: LayerGroup, generator: np.random.Generator) -> "EntryOracle":
        shape = (NUM_TOKENS, group.planes, group.num_kv_heads, group.head_dim)
        return cls(generator.standard_normal(shape), group.keeps.every, group.kind.dtype or torch.float32)

    def entries(self, ids: Ids, which: Sequence[int]) -> list[Tensor]:
        """Returns for each plane [n, heads, dim] those entries of a sequence with these ids."""
        tokens = np.array([ids[(at + 1) * self.every - 1] for at in which], np.int64)
        return list(torch.from_numpy(self.numbers[tokens]).to(self.dtype).unbind(1))


@dataclass(frozen=True)
class IndexOracle:
    """A layer's index, float64: q and keys [tokens, positions, heads, D], rotated for every position, and weights."""

    q: NDArray[np.float64]
    keys: NDArray[np.float64]
    weights: NDArray[np.float64]
    top_k: int

    @classmethod
    def of(cls, setting: Setting, layer: int, q: NDArray[np.float64], k: NDArray[np.float64]) -> "IndexOracle":
        choice = choice_of(setting.layout, layer, *(torch.from_numpy(x.astype(np.float32)) for x in (q, k)))
        group = index_keys(setting.layout)[layer][0]
        kind = setting.layout.groups[group].kind
        assert choice is not None
        assert isinstance(kind, IndexKeys)
        keys = torch.cat((choice.still, choice.rotated), 1).unsqueeze(1)
        index_q, keys, weights = (x.double().numpy() for x in (choice.q, keys, choice.weights))
        rope = setting.ropes[group]
        keys = rotate_everywhere(keys, rope)
        if setting.layout.scales is not None:
            keys = _rounded(keys, kind.head_dim)
        return cls(rotate_everywhere(index_q, rope), keys, weights, kind.top_k)

    def hide(
        self,
        hidden: NDArray[np.bool_],
        ids: NDArray[np.int64],
        last: NDArray[np.int64],
        at: NDArray[np.int64],
        swapped: bool,
    ) -> NDArray[np.bool_]:
        """hidden [n, m], and what the last tokens of texts ids [n, m], `last` at positions `at`, do not choose."""
        keys = self.keys[ids, np.arange(ids.shape[1]), 0]
        arrays = self.q[last, at], self.weights[last], keys, hidden
        q, weights, near, hides = map(torch.from_numpy, arrays)
        return hide_others(q, weights, near, hides, self.top_k, swapped=swapped).numpy()


def _rounded(x: NDArray[np.float64], quantized: int | None) -> NDArray[np.float64]:
    """Returns what rows in 8 bits leave of x. Rotated K is not given: float32 and float64 may round it differently."""
    assert quantized is not None, "the layout keeps K and V"
    return round_rows(torch.from_numpy(x), quantized).numpy()


def rotate_everywhere(x: NDArray[np.float64], rope: RopeParameters) -> NDArray[np.float64]:
    """[tokens, positions, heads, D] of x [tokens, heads, D], whose last rotary_dim numbers are rotated."""
    factors = RotaryEmbedding(rope, MAX_POSITIONS, "cpu", torch.float64).rotation(torch.arange(MAX_POSITIONS))
    still, turned = np.split(x, [x.shape[2] - rope.rotary_dim], 2)
    half = np.roll(turned, rope.rotary_dim // 2, -1)
    rotated = turned[:, None] * factors.cos.numpy() + half[:, None] * factors.signed_sin.numpy()
    return np.concatenate((np.broadcast_to(still[:, None], (*rotated.shape[:3], still.shape[2])), rotated), 3)
