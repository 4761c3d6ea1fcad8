"""Checks when shared pages of a batch are looked for, and when earlier findings still hold."""

import numpy as np
import pytest

from tandem.cache.attention.batch_prefixes import BatchPrefixes
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule
from tandem.cache.plan.spans import Paging

ROWS, LENGTHS = np.array([0, 2, 1]), np.array([11, 9, 10], np.int32)


@pytest.fixture
def table() -> GroupTable:
    """Rows 0 and 1 share pages 7 and 8, and row 2 also has page 7."""
    table = GroupTable(3, 4, Paging(1, 4))
    table.pages[:, :3] = [[7, 8, 1], [7, 8, 2], [7, 3, 4]]
    return table


def segments(shared: SharedPrefixes | None) -> list[tuple[list[int], list[int]]]:
    """Returns for each segment the sequences of the batch, and the pages."""
    assert shared is not None
    members = np.split(shared.members, shared.qo_indptr[1:-1])
    pages = np.split(shared.kv_indices, shared.kv_indptr[1:-1])
    return [(of.tolist(), its.tolist()) for of, its in zip(members, pages, strict=True)]


def test_pages_that_all_members_hold_in_full_are_found(table: GroupTable) -> None:
    prefixes = BatchPrefixes(table, SharingRule(1, 1))
    assert segments(prefixes.find(ROWS, LENGTHS)) == [([0, 1, 2], [7]), ([0, 2], [8])]
    ends = np.array([8, 9, 8], np.int32)  # with it the second page is full: it is still written to
    assert segments(prefixes.find(ROWS.copy(), ends)) == [([0, 1, 2], [7])]


def test_nothing_is_shared_without_a_rule_or_by_one(table: GroupTable) -> None:
    assert BatchPrefixes(table, None).find(ROWS, LENGTHS) is None
    assert BatchPrefixes(table, SharingRule(1, 1)).find(ROWS[:1], LENGTHS[:1]) is None


def test_what_was_found_holds_until_rows_or_their_pages_change(table: GroupTable) -> None:
    prefixes, able = BatchPrefixes(table, SharingRule(1, 1)), np.array([True, False, True])
    found = prefixes.find(ROWS, LENGTHS)
    assert prefixes.find(ROWS, LENGTHS + np.int32(1)) is found
    assert segments(prefixes.find(ROWS, LENGTHS, able)) == [([0, 2], [7, 8])]
    assert segments(prefixes.find(ROWS, LENGTHS, ~able | True)) == segments(found)
    assert segments(prefixes.find(ROWS[:2].copy(), LENGTHS[:2])) == [([0, 1], [7])]
    found = prefixes.find(ROWS, LENGTHS)
    table.pages[1, 1] = 9
    assert prefixes.find(ROWS, LENGTHS) is found
    table.num_changes += 1
    assert segments(prefixes.find(ROWS, LENGTHS)) == [([0, 1, 2], [7])]
