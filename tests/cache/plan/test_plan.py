import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.position_map import SlotRuns
from tandem.cache.plan.tables import NO_WRITES, lay_out_tokens, look_up_pages, runs_of, slots_of

PAGE_SIZE, MAX_PAGES = 4, 40


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A page table, some of its rows, lengths before the append, lengths appended."""
    size = draw(st.integers(1, 6))
    rows = np.array(draw(st.permutations(range(8))))[:size]
    longest = draw(st.sampled_from([3, 12, 100]))  # alike, or very unlike
    lengths = np.array(draw(st.lists(st.integers(0, longest), min_size=size, max_size=size)), np.int64)
    most = draw(st.sampled_from([1, 9]))
    appends = np.array(draw(st.lists(st.integers(1, most), min_size=size, max_size=size)), np.int64)
    table = np.random.default_rng(draw(st.integers(0, 99))).permutation(8 * MAX_PAGES).reshape(8, MAX_PAGES)
    return table.astype(np.int32), rows, lengths, appends


@given(batches())
def test_as_token_by_token(batch: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    table, rows, lengths, appends = batch
    tokens = lay_out_tokens(lengths, appends)
    tables = look_up_pages(table, rows, tokens, PAGE_SIZE)
    positions, owners, slots, indices, indptr, starts = [], [], [], [], [0], [0]
    for index, (row, length, count) in enumerate(zip(rows, lengths, appends, strict=True)):
        for position in range(length, length + count):
            positions.append(position)
            owners.append(index)
            slots.append(table[row, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        used = -(-(length + count) // PAGE_SIZE)
        indices += table[row, :used].tolist()
        indptr.append(len(indices))
        starts.append(len(positions))
    assert tokens.positions.tolist() == positions
    assert tokens.owners.tolist() == owners
    assert tokens.qo_indptr.tolist() == starts
    assert tokens.seq_lens.tolist() == (lengths + appends).tolist()
    assert tables.slot_mapping.tolist() == slots
    assert tables.kv_indices.tolist() == indices
    assert tables.kv_indptr.tolist() == indptr
    assert tables.kv_last_page_len.tolist() == [(length - 1) % PAGE_SIZE + 1 for length in lengths + appends]
    arrays = [tokens.positions, tokens.qo_indptr, tokens.seq_lens, *vars(tables).values()][:-2]
    assert tables.shared is None
    assert (tables.writes, tables.drafted) == (NO_WRITES, False)
    assert {array.dtype for array in arrays if array is not None} == {np.dtype(np.int32)}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True), st.data())
def test_runs_of_positions_are_the_fewest(pages: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(1, len(pages) * PAGE_SIZE))
    begin = data.draw(st.integers(0, end - 1))
    ids = np.array(pages, np.int32)
    slots = slots_of(ids[None], 0, np.arange(begin, end), PAGE_SIZE)
    assert slots.tolist() == [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(begin, end)]
    assert runs_of(ids, begin, end, PAGE_SIZE) == SlotRuns.from_slots(slots)


def test_a_long_fresh_sequence_is_one_run() -> None:
    runs = runs_of(np.arange(100, 100 + 2048, dtype=np.int32), 5, 32 * 1024, 16)
    assert (runs.begins.tolist(), runs.lengths.tolist()) == ([1605], [32 * 1024 - 5])


def test_a_plan_cannot_be_changed() -> None:
    tokens = lay_out_tokens(np.array([3]), np.array([2]))
    with pytest.raises(AttributeError):
        tokens.positions = tokens.seq_lens  # pyright: ignore[reportAttributeAccessIssue]
