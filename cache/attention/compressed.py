"""Compressed KV in one forward: makes the entries that tokens complete from stored inputs, and finds the entries that
each token sees.

See tandem.cache.kernels.torch.compressed for how entries are made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import Compression, Extra, GroupPlan, IndexQuery
from tandem.cache.kernels.torch.compressed import compress, mask_of, rotate_neighbours, sequence_slots
from tandem.cache.kernels.torch.entries import entries_at, places_of
from tandem.cache.kernels.torch.index import SCORES_AT_ONCE, choose, score
from tandem.cache.kinds.compressed import CompressedGroups
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout

Store = Callable[[int, int, Tensor, Tensor | None], None]
"""Stores entries as Attention.store does."""


class _Group(NamedTuple):
    """One of the groups of CompressedGroups, and its plan."""

    group: int
    pool: Tensor
    plan: GroupPlan

    @property
    def width(self) -> int:
        """The number of elements of an entry."""
        return self.pool.shape[5]


@dataclass(frozen=True, eq=False)
class _Kind:
    """Layers whose compressed KV stands in the same groups. n entries are new, each of k positions.

    sources: where the k inputs of each new entry are, flat; present: bool [n, k, 1], False before the text begins.
    starts: the rotation of the new entries. entries, keys: of each sequence, where its entries are. visible: int64 [T],
    of how many entries each token sees the first.
    """

    every: int
    inputs: _Group
    made: tuple[_Group, ...]  # entries, then keys
    sources: Tensor
    present: Tensor
    starts: Rotation | None
    places: tuple[Sequence[Tensor], ...]
    visible: Tensor


@dataclass(eq=False)
class CompressedForward:
    """The groups, plans and tokens of one forward. rotations: gives each group's rotation at given positions, int64
    [n]."""

    groups: Sequence[GroupAttention]
    plans: Sequence[GroupPlan]
    rotations: Callable[[Tensor], Sequence[Rotation | None]]
    _kinds: dict[CompressedGroups, _Kind] = field(default_factory=dict)

    def extend(
        self,
        of: CompressedGroups,
        attended: int,
        layer: int,
        places: tuple[int, int, int],
        x: Compression,
        store: Store,
    ) -> list[Extra]:
        """Stores the inputs of a layer's new tokens and the entries that these complete. What each sequence's new
        tokens see of its entries.

        attended: the layer's group with K and V. places: its index in the groups of inputs, entries and keys.
        """
        if of not in self._kinds:
            self._kinds[of] = self._plan(of, attended)
        kind, tokens = self._kinds[of], self.plans[attended].tokens
        assert tokens is not None  # not in graph buffers
        check_compression(x, tokens.positions.size, kind.every, kind.inputs.width, [one.pool for one in kind.made])
        store(of.inputs, layer, x.values.unsqueeze(1), x.gates.unsqueeze(1))
        values, gates = (one.squeeze(1) for one in entries_at(kind.inputs.pool, places[0], kind.sources))
        shape = (*kind.present.shape[:2], kind.inputs.width)
        gates = gates.view(shape) + x.bias.tile(kind.present.shape[1] // kind.every, 1)
        values, gates = values.view(shape).masked_fill(~kind.present, 0), gates.masked_fill(~kind.present, -torch.inf)
        begin = 0
        for made, norm in zip(kind.made, x.norms, strict=True):
            size = made.width
            parts = [_series(one, begin, size, kind.every) for one in (values, gates)]
            new = compress(parts[0], parts[1], norm, x.eps).to(made.pool.dtype).unsqueeze(1)
            store(made.group, layer, rotate_neighbours(new, kind.starts), None)
            begin += size * (kind.present.shape[1] // kind.every)
        query = x.query
        if query is not None:
            query = IndexQuery(rotate_neighbours(query.q, self.plans[attended].rotation), query.weights)
        return [self._seen(kind, of, places, tokens, sequence, query) for sequence in range(tokens.seq_lens.size)]

    def _seen(
        self,
        kind: _Kind,
        of: CompressedGroups,
        places: tuple[int, int, int],
        tokens: TokenLayout,
        sequence: int,
        query: IndexQuery | None,
    ) -> Extra:
        begin, end = tokens.qo_indptr[sequence : sequence + 2].tolist()
        where, count = kind.places[0][sequence], kind.places[0][sequence].shape[1]
        visible = kind.visible[begin:end, None]
        seen = torch.arange(count, device=visible.device) < visible
        pool = kind.made[0].pool
        if query is None or of.top_k is None or count <= of.top_k:
            return Extra(entries_at(pool, places[1], where)[0].squeeze(1), seen, begin)
        keys = entries_at(kind.made[1].pool, places[2], kind.places[1][sequence])[0].squeeze(1)
        at_once, chosen = max(1, SCORES_AT_ONCE // (query.q.shape[1] * count)), []
        for first in range(begin, end, at_once):
            rows = slice(first, min(first + at_once, end))
            mask = mask_of(seen[rows.start - begin : rows.stop - begin])
            chosen.append(choose(score(query.q[rows], query.weights[rows], keys, mask), of.top_k).long())
        if end - begin == 1:  # a decode reads what it has chosen alone
            only = chosen[0][chosen[0] >= 0]
            entries = entries_at(pool, places[1], where[:, only])[0].squeeze(1)
            return Extra(entries, torch.ones(1, only.shape[0], dtype=torch.bool, device=seen.device), begin)
        positions = torch.cat(chosen)
        taken = torch.zeros(seen.shape[0], count + 1, dtype=torch.bool, device=seen.device)
        taken.scatter_(1, torch.where(positions < 0, count, positions), True)
        return Extra(entries_at(pool, places[1], where)[0].squeeze(1), taken[:, :count], begin)

    def _plan(self, of: CompressedGroups, attended: int) -> _Kind:
        inputs, entries = self._group(of.inputs), self._group(of.entries)
        made = (entries,) if of.keys is None else (entries, self._group(of.keys))
        every, tokens, new = self.groups[of.entries].table.every, self.plans[attended].tokens, entries.plan.tokens
        assert tokens is not None
        assert new is not None
        width, total = inputs.width, sum(one.width for one in made)
        count = every * (width // total)
        starts = new.positions.astype(np.int64) * every
        positions = (starts + every - count)[:, None] + np.arange(count)
        present = positions >= 0
        slots = _slots(inputs, new.owners, np.maximum(positions, 0))
        device = inputs.pool.device
        rotations = self.rotations(torch.from_numpy(starts).to(device)) if starts.size else None
        return _Kind(
            every,
            inputs,
            made,
            places_of(inputs.pool, slots.reshape(-1)),
            torch.from_numpy(present).to(device).unsqueeze(2),
            None if rotations is None else rotations[attended],
            tuple([_places(one, one.plan.tables, i) for i in range(new.seq_lens.size)] for one in made),
            torch.from_numpy((tokens.rope_positions + 1) // every).to(device),
        )

    def _group(self, index: int) -> _Group:
        return _Group(index, self.groups[index].site.pool, self.plans[index])


def check_compression(x: Compression, num_tokens: int, every: int, width: int, made: Sequence[Tensor]) -> None:
    """InvalidArgument unless x fits its groups, but for inputs. width: of inputs. made: pools of entries, then of
    keys."""
    device = made[0].device
    check_tensor("compression.bias", x.bias, (every, width), torch.float32, device)
    sizes = [one.shape[5] for one in made]
    if [norm.shape for norm in x.norms] != [(size,) for size in sizes]:
        raise InvalidArgument(
            f"compression.norms have shapes {[tuple(norm.shape) for norm in x.norms]}; they must be {sizes}"
        )
    if (x.query is None) != (len(sizes) == 1):
        raise InvalidArgument("compression.query must be given exactly where the layer has index keys")
    if x.query is not None:
        heads = x.query.q.shape[1] if x.query.q.dim() == 3 else 1
        check_tensor("query.q", x.query.q, (num_tokens, heads, sizes[1]), made[1].dtype, device)
        check_tensor("query.weights", x.query.weights, (num_tokens, heads), torch.float32, device)


def _series(x: Tensor, begin: int, size: int, every: int) -> Tensor:
    """[n, k, size], of x [n, k, W]: what makes one kind of entry, whose numbers begin at `begin`. Of the positions of
    the entry before the first half, where there are any, and of its own the second."""
    if x.shape[1] == every:
        return x[..., begin : begin + size]
    before, own = x[:, :every, begin : begin + size], x[:, every:, begin + size : begin + 2 * size]
    return torch.cat((before, own), 1)


def _slots(group: _Group, owners: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 [n, k]: where positions [n, k] of sequences owners [n] of the forward are in a group with an entry each."""
    tables, tokens, size = group.plan.tables, group.plan.tokens, group.pool.shape[4]
    assert tokens is not None
    first = (tokens.seq_lens - tables.kv_lens).astype(np.int64)[owners][:, None]
    relative = np.maximum(positions - first, 0)
    pages = tables.kv_indices[tables.kv_indptr[owners][:, None] + relative // size]
    return pages.astype(np.int64) * size + relative % size


def _places(group: _Group, tables: PageTables, sequence: int) -> Tensor:
    return places_of(group.pool, sequence_slots(tables, sequence, group.pool.shape[4]))
