"""Finds sequences of a batch that share pages, level by level, so that each page is read once for all that share it.

Sequences share pages by fork or by the prefix index, so what they share begins at their first page, and the levels
are the inner nodes of a tree:

pages  a a a b b c │      level 1: a a a, sequences 0 … 3
           a a a b b d │      level 2: b b,   sequences 0 and 1
           a a a e     │      what is left (c, d, e, f f) is each one's own
           a a a f f   │

Attention over a sequence's pages is attention over its levels and over the rest, merged by their log-sum-exps (as in
FlashInfer's cascade inference; Ye et al., 2024), whatever the depth.
"""

from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array, indptr_of, ragged_rows

MOST_SPLITS = 16  # branchings that are looked at from the first page on; below them sequences attend by themselves


@dataclass(frozen=True)
class SharingRule:
    """The least sharing for which attending apart to shared pages is faster. least_of_segment: pages that a segment
    must save, which are (sequences - 1) · pages; a smaller segment is attended to with the level below. least: pages
    that all segments must save together."""

    least_of_segment: int
    least: int


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """S segments, each some sequences and the pages that they have in common, in the order of their levels.

    members: int64; segment s has the sequences members[qo_indptr[s] : qo_indptr[s + 1]] of the batch, ascending, and
    the pages kv_indices[kv_indptr[s] : kv_indptr[s + 1]], all full. qo_indptr, kv_indptr: int32 [S + 1]. own_begins:
    int64 [B], the pages of each sequence that segments cover; from there on it attends by itself.
    """

    members: Int64Array
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    own_begins: Int64Array


@dataclass(frozen=True, eq=False)
class _Groups:
    """Sequences with equal pages up to a page index. Group g has members[bounds[g] : bounds[g + 1]] (int64).

    common: int64, the pages that each member has in common with the first of its group. begins: int64 [g], the page
    index from which on no segment covers a group's pages.
    """

    members: Int64Array
    bounds: Int64Array
    common: Int64Array
    begins: Int64Array


def find_shared_prefixes(
    pages: Int32Array, rows: Int64Array, limits: Int64Array, rule: SharingRule
) -> SharedPrefixes | None:
    """pages: int32 [max_sequences, max_pages], a layer group's page table; rows: int64 [B], the sequences' rows in it;
    limits: int64 [B], how many of each one's first pages may be shared. None where it does not pay.

    Costs a sort of B numbers when no two sequences begin with the same page.
    """
    able = limits.nonzero()[0]
    divided = _divide(pages[rows[able], 0].astype(np.int64))
    if divided is None:
        return None
    chosen, bounds = divided
    return _Finder(pages, rows, limits, rule).find(able[chosen], bounds)


class _Finder:
    def __init__(self, pages: Int32Array, rows: Int64Array, limits: Int64Array, rule: SharingRule) -> None:
        self._pages, self._rows, self._limits, self._rule = pages, rows, limits, rule
        self._segments: list[tuple[Int64Array, ...]] = []
        self._own_begins = np.zeros(rows.size, np.int64)

    def find(self, members: Int64Array, bounds: Int64Array) -> SharedPrefixes | None:
        """members, bounds: groups that begin with the same page."""
        common = self._compare(members, bounds)
        groups = self._worthy(_Groups(members, bounds, common, np.zeros(bounds.size - 1, np.int64)))
        for _ in range(MOST_SPLITS):
            if groups is not None:
                groups = self._split(groups)
        if not self._segments:
            return None
        members, sizes, begins, ends = (np.concatenate(arrays) for arrays in zip(*self._segments, strict=True))
        counts = ends - begins
        if int((sizes - 1) @ counts) < self._rule.least:
            return None
        qo_indptr = indptr_of(sizes)
        kv_indptr = indptr_of(counts)
        kv_indices = ragged_rows(self._pages, self._rows[members[qo_indptr[:-1]]], kv_indptr, begins)
        return SharedPrefixes(members, qo_indptr, kv_indptr, kv_indices, self._own_begins)

    def _split(self, groups: _Groups) -> _Groups | None:
        """Makes segments of what the groups have in common, where it pays; the groups that they fall apart into."""
        members, common, sizes = groups.members, groups.common, groups.bounds[1:] - groups.bounds[:-1]
        ends = np.minimum.reduceat(common, groups.bounds[:-1])
        pays = (sizes - 1) * (ends - groups.begins) >= self._rule.least_of_segment
        owners = np.arange(sizes.size).repeat(sizes)
        ends_of = ends[owners]
        if pays.any():
            paid = pays[owners]
            chosen = members[paid]
            self._segments.append((chosen, sizes[pays], groups.begins[pays], ends[pays]))
            self._own_begins[chosen] = ends_of[paid]
        going = (self._limits[members] > ends_of).nonzero()[0]
        members, owners, common, ends_of = members[going], owners[going], common[going], ends_of[going]
        # Those that go on with the first of their group need not be compared with it again.
        staying = common > ends_of
        pages = np.where(staying, 0, self._pages[self._rows[members], ends_of] + 1)
        divided = _divide(owners << 32 | pages)
        if divided is None:
            return None
        chosen, bounds = divided
        members, common, staying = members[chosen], common[chosen], staying[chosen]
        if not staying.all():
            new = ~staying
            sizes = (bounds[1:] - bounds[:-1])[new[bounds[:-1]]]
            common[new] = self._compare(members[new], indptr_of(sizes))
        begins = np.where(pays, ends, groups.begins)[owners[chosen[bounds[:-1]]]]
        return self._worthy(_Groups(members, bounds, common, begins))

    def _worthy(self, groups: _Groups) -> _Groups | None:
        """Returns the groups that would save enough if all their members had the pages of the longest in common."""
        sizes = groups.bounds[1:] - groups.bounds[:-1]
        most = np.maximum.reduceat(self._limits[groups.members], groups.bounds[:-1])
        kept = (sizes - 1) * (most - groups.begins) >= self._rule.least_of_segment
        if kept.all():
            return groups
        if not kept.any():
            return None
        of_members = kept.repeat(sizes)
        bounds = indptr_of(sizes[kept]).astype(np.int64)
        return _Groups(groups.members[of_members], bounds, groups.common[of_members], groups.begins[kept])

    def _compare(self, members: Int64Array, bounds: Int64Array | Int32Array) -> Int64Array:
        """int64 [m]: how many pages each member has in common with the first of its group."""
        leaders = bounds[:-1].repeat(bounds[1:] - bounds[:-1])
        limits = self._limits[members]
        limits = np.minimum(limits, limits[leaders])
        width = int(limits.max())
        rows = self._pages[self._rows[members], :width]
        unlike = rows != (rows[0] if bounds.size == 2 else rows[leaders])
        firsts = unlike.argmax(1)
        alike = ~unlike[np.arange(members.size), firsts]
        return np.minimum(np.where(alike, width, firsts), limits)


def _divide(keys: Int64Array) -> tuple[Int64Array, Int64Array] | None:
    """The groups of at least two equal keys (int64), in the keys' order: where they stand, group after group, and the
    groups' bounds; None where there is none."""
    order = keys.argsort(kind="stable")
    ordered = keys[order]
    alike = ordered[1:] == ordered[:-1]
    if not alike.any():
        return None
    kept = np.zeros(keys.size, np.bool_)
    kept[:-1] = alike
    kept[1:] |= alike
    firsts = kept.copy()
    firsts[1:] &= ~alike
    starts = firsts[kept].nonzero()[0]
    chosen = order[kept]
    return chosen, np.concatenate((starts, (chosen.size,)))
