"""The levels at which sequences share pages, against a finder that walks a tree of dictionaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.shared_prefixes import MOST_SPLITS, SharedPrefixes, SharingRule, find_shared_prefixes

MOST_PAGES = 12
Segment = tuple[tuple[int, ...], tuple[int, ...]]
"""The sequences and the pages that they have in common."""


def naive_segments(sequences: dict[int, list[int]], begin: int, end: int, rule: SharingRule) -> list[Segment]:
    """Segments of `sequences`, whose pages are equal up to `end`; those before `begin` are covered already."""
    found: list[Segment] = []
    while len({pages[end] if end < len(pages) else -1 for pages in sequences.values()}) == 1 and all(
        end < len(pages) for pages in sequences.values()
    ):
        end += 1
    if (len(sequences) - 1) * (end - begin) >= rule.least_of_segment:
        some = next(iter(sequences.values()))
        found.append((tuple(sequences), tuple(some[begin:end])))
        begin = end
    following = {pages[end] for pages in sequences.values() if end < len(pages)}
    for page in following:
        branch = {one: pages for one, pages in sequences.items() if end < len(pages) and pages[end] == page}
        if len(branch) > 1:
            found += naive_segments(branch, begin, end, rule)
    return found


def naive(sequences: dict[int, list[int]], rule: SharingRule) -> list[Segment]:
    found: list[Segment] = []
    for page in {pages[0] for pages in sequences.values() if pages}:
        branch = {one: pages for one, pages in sequences.items() if pages and pages[0] == page}
        if len(branch) > 1:
            found += naive_segments(branch, 0, 0, rule)
    saved = sum((len(members) - 1) * len(pages) for members, pages in found)
    return found if saved >= rule.least else []


def segments_of(shared: SharedPrefixes) -> list[Segment]:
    queries, pages = shared.qo_indptr.tolist(), shared.kv_indptr.tolist()
    return [
        (
            tuple(shared.members[queries[s] : queries[s + 1]].tolist()),
            tuple(shared.kv_indices[pages[s] : pages[s + 1]].tolist()),
        )
        for s in range(len(queries) - 1)
    ]


def table_of(tables: list[list[int]]) -> tuple[Int32Array, np.ndarray, np.ndarray]:
    """A page table with other sequences' rows between these, and what stands past the limits in each row."""
    pages = np.full((2 * len(tables), MOST_PAGES + 2), 3, np.int32)
    rows = np.arange(len(tables))[::-1] * 2 + 1
    for row, table in zip(rows, tables, strict=True):
        pages[row, : len(table)] = table
    return pages, rows, np.array([len(table) for table in tables])


# Few ids and long common beginnings, so that trees are deep; page ids do not tell what is before them.
TABLES = st.lists(
    st.builds(
        lambda trunk, tail: (trunk + tail)[:MOST_PAGES],
        st.sampled_from([[], [1, 1, 1, 1], [1, 1, 2, 5, 5], [1, 1, 2, 5, 5, 6, 7], [4]]),
        st.lists(st.integers(0, 2), max_size=8),
    ),
    min_size=1,
    max_size=12,
)


@given(TABLES, st.integers(0, 6), st.integers(0, 12))
def test_as_a_tree_of_dictionaries_has_it(tables: list[list[int]], least_of_segment: int, least: int) -> None:
    rule = SharingRule(least_of_segment + 1, least)
    expected = naive(dict(enumerate(tables)), rule)
    shared = find_shared_prefixes(*table_of(tables), rule)
    assert (shared is None) == (not expected)
    if shared is None:
        return
    assert sorted(segments_of(shared)) == sorted(expected)
    covered: dict[int, list[int]] = {sequence: [] for sequence in range(len(tables))}
    for members, pages in segments_of(shared):  # level by level: what covers a sequence comes in its pages' order
        for sequence in members:
            covered[sequence] += pages
    for sequence, table in enumerate(tables):
        own = int(shared.own_begins[sequence])
        assert covered[sequence] + table[own:] == table


def test_levels_of_forks() -> None:
    tables = [[9, 8, 7, 1], [9, 8, 7, 2], [9, 8, 7, 6, 3], [9, 8, 7, 6, 4], [5, 5], [9, 8, 7, 6, 0]]
    shared = find_shared_prefixes(*table_of(tables), SharingRule(1, 0))
    assert shared is not None
    assert segments_of(shared) == [((0, 1, 2, 3, 5), (9, 8, 7)), ((2, 3, 5), (6,))]
    assert shared.own_begins.tolist() == [3, 3, 4, 4, 0, 4]
    # Where a level does not pay, its pages are attended to with the level below.
    shared = find_shared_prefixes(*table_of([[1, 2, 2, 2], [1, 2, 2, 2, 5], [1, 3]]), SharingRule(4, 0))
    assert shared is not None
    assert segments_of(shared) == [((0, 1), (1, 2, 2, 2))]


@pytest.mark.parametrize("tables", [[[1]], [[], []], [[1, 2], [2, 1], [3]]])
def test_nothing_in_common(tables: list[list[int]]) -> None:
    assert find_shared_prefixes(*table_of(tables), SharingRule(1, 0)) is None


def test_the_search_ends() -> None:
    """A chain of forks, each a page deeper than the last: below the last split looked at, they attend by themselves."""
    depth = 2 * MOST_SPLITS
    pages = np.tril(np.ones((depth, depth), np.int32)) * np.arange(depth) + 100 * np.arange(depth)[:, None] * np.triu(
        np.ones((depth, depth), np.int32), 1
    )
    shared = find_shared_prefixes(pages.astype(np.int32), np.arange(depth), np.arange(1, depth + 1), SharingRule(1, 0))
    assert shared is not None
    assert int(shared.own_begins.max()) == MOST_SPLITS
