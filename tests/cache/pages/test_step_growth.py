"""How tables change by a step, as C plans it, against numpy's plan of any growth."""

from typing import Any, cast

import numpy as np
import pytest

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.group_pages import GroupPages, lay_out_appends
from tandem.cache.pages.page_users import PageUsers
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.pages.step_growth import StepChange, StepGrowth
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.spans import ALL, Chunk, Every, Paging, Span, Window
from tests.cache.known import assert_same

PAGE, GRAIN, ROWS, LONGEST = 4, 24, 12, 240
GROUPS: list[tuple[Span, Paging]] = [
    (ALL, Paging(1, PAGE)),
    (Every(3), Paging(3, PAGE)),
    (Every(8), Paging(8, 1)),
    (Window(1), Paging(1, PAGE)),
    (Window(11), Paging(1, PAGE)),
    (Chunk(12), Paging(1, PAGE)),
]


class Tables:
    """Random rows, as they may stand before a step."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.table = SequenceTable([paging for _, paging in GROUPS], ROWS, LONGEST, PAGE)
        self.table.reserved[:] = random.integers(0, LONGEST, ROWS) * random.integers(0, 2, ROWS)
        self.groups = [
            GroupPages(span, group, PageUsers(PageAllocator(1)), cast(Any, None), GRAIN, self.table.sliding)
            for (span, _), group in zip(GROUPS, self.table.groups, strict=True)
        ]
        lengths = random.integers(0, LONGEST - 8, ROWS)
        for group in self.groups:
            table = group.table
            table.pages[:] = random.permutation(table.pages.size).reshape(table.pages.shape)
            past = np.maximum(lengths - random.integers(0, 12, ROWS), 0)
            table.begins[:] = group.keeps.first_pages(past, table.page_size, GRAIN)
            held = [table.paging.num_pages(length) for length in lengths.tolist()]
            most = table.pages.shape[1]
            table.ends[:] = np.maximum(np.minimum(held + random.integers(0, 3, ROWS), most), table.begins)
            table.budgets[:] = random.integers(0, 12, ROWS)
        self.lengths = lengths

    def expected(
        self, number: int, rows: Int64Array, lengths: Int64Array, ends: Int64Array, queries: Int64Array
    ) -> Any:
        """Plans the step as a StepChange."""
        group, paging = self.groups[number], GROUPS[number][1]
        appends = lay_out_appends(self.table, paging, rows, lengths, ends, queries)
        growth = group.plan_growth(appends)
        held = group.table.begins[rows]
        begins = held if growth.begins is None else growth.begins
        which = ((growth.counts > 0) | (begins > held)).nonzero()[0]
        changed = rows[which], begins[which], growth.starts[which], growth.counts[which]
        opened = rows[growth.opened], appends.ends[growth.opened] - 1
        return StepChange(*changed, *opened, growth.gone, growth.num_pages)


def compare(tables: Tables, count: int, most: int, in_flight: int) -> int:
    """How many groups a step of `count` rows by up to `most` positions changes."""
    random, keeps = tables.random, [span for span, _ in GROUPS]
    steps = StepGrowth.load(tables.table.groups, keeps, GRAIN, tables.table.reserved)
    assert steps is not None
    rows = random.permutation(ROWS)[:count]
    lengths = tables.lengths[rows]
    ends, queries = lengths + random.integers(1, most + 1, count), np.maximum(lengths - in_flight, 0)
    expected = [tables.expected(number, rows, lengths, ends, queries) for number in range(len(GROUPS))]
    found = steps.plan(rows, lengths, ends, queries)
    if found is None:
        assert max(change.gone.size for change in expected) > 2 * count
        return 0
    for name in StepChange._fields[:-1]:
        for index, of in enumerate(expected):
            one = getattr(found[index], name) if found else np.empty(0, getattr(of, name).dtype)
            assert_same(one, getattr(of, name))
    assert [change.num_pages for change in found] == [of.num_pages for of in expected] or not found
    return sum(bool(of.rows.size or of.opened_rows.size) for of in expected)


@pytest.mark.parametrize("most", [1, 5])
def test_a_step_changes_what_any_growth_would(most: int) -> None:
    random = np.random.default_rng(most)
    changed = [
        compare(Tables(random), int(random.integers(1, ROWS + 1)), most, int(random.integers(0, 3))) for _ in range(300)
    ]
    assert sum(changed) > 300
    assert 0 in changed
