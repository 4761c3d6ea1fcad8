"""Page tables as C and as numpy look them up, against a loop over positions."""

import numpy as np
import pytest

from tandem.cache.attention import page_look_up
from tandem.cache.attention.page_look_up import SOURCE, PageLookUp
from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.pages.sliding_table import SlidingTable
from tandem.cache.plan.spans import Paging
from tandem.cache.plan.tables import PageTables, lay_out_tokens
from tests.cache.known import assert_same

PAGE, ROWS, NUM_PAGES, WINDOW = 4, 9, 12, 10


def expected_tables(table: GroupTable, rows: list[int], lengths: list[int], appends: list[int]) -> PageTables:
    """lengths: before the appends."""
    slots, indptr, indices, last_page_lens, kv_lens = [], [0], [], [], []
    for row, length, append in zip(rows, lengths, appends, strict=True):
        pages, begin = table.pages[row].tolist(), int(table.begins[row])
        stored = [pages[at // PAGE] * PAGE + at % PAGE for at in range(begin * PAGE, length + append)]
        slots += stored[-append:]
        kv_lens.append(len(stored))
        indices += pages[begin : (length + append - 1) // PAGE + 1]
        indptr.append(len(indices))
        last_page_lens.append(stored[-1] % PAGE + 1)
    lists = slots, indptr, indices, last_page_lens, kv_lens
    first, second, third, fourth, fifth = (np.array(one, np.int32) for one in lists)
    return PageTables(first, second, third, fourth, fifth)


@pytest.fixture(params=["native", "numpy"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "native":
        assert load_library(SOURCE) is not None
    else:
        monkeypatch.setattr(page_look_up, "load_short_calls", lambda source: None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("window", [None, WINDOW])
def test_tables(window: int | None) -> None:
    random = np.random.default_rng(0)
    table = GroupTable(ROWS, NUM_PAGES, Paging(1, PAGE))
    look_up = PageLookUp(table)
    for size in [*range(1, ROWS + 1), ROWS]:
        table.pages[:] = random.permutation(ROWS * NUM_PAGES).reshape(ROWS, NUM_PAGES)
        rows = random.permutation(ROWS)[:size]
        appends = random.integers(1, 7, size) if size % 3 else np.ones(size, np.int64)
        lengths = random.integers(0, PAGE * NUM_PAGES - 6, size)
        if window is not None:
            table.begins[rows] = np.maximum(lengths - window + 1, 0) // PAGE
        found = look_up.look_up(rows, lay_out_tokens(lengths, appends))
        expected = expected_tables(table, rows.tolist(), lengths.tolist(), appends.tolist())
        for name in ("slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_lens"):
            assert_same(getattr(found, name), getattr(expected, name))


@pytest.mark.usefixtures("_way")
def test_slots_of_sliding_sequences() -> None:
    """Sinks are whole pages or not, more than there are positions, or none."""
    random = np.random.default_rng(0)
    table, streams = GroupTable(ROWS, NUM_PAGES, Paging(1, PAGE)), SlidingTable(ROWS, PAGE)
    table.pages[:] = random.permutation(ROWS * NUM_PAGES).reshape(ROWS, NUM_PAGES)
    look_up = PageLookUp(table)
    for _ in range(20):
        streams.sinks[:] = random.integers(0, 9, ROWS)
        lengths = random.integers(1, PAGE * NUM_PAGES, ROWS)
        streams.holes[:] = random.integers(0, np.maximum(lengths - streams.sinks, 1))
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        bounds, slots = look_up.sliding_slots(rows, lengths, streams)
        expected, ends = [], [0]
        for row in rows.tolist():
            sink, hole = int(streams.sinks[row]), int(streams.holes[row])
            used = [index for index in range(lengths[row]) if not sink <= index < sink + hole]
            expected += [int(table.pages[row, index // PAGE]) * PAGE + index % PAGE for index in used]
            ends.append(len(expected))
        assert_same(bounds, np.array(ends, np.int32))
        assert_same(slots, np.array(expected, np.int32))
