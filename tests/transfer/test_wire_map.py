from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.position_map import SKIP, PositionMap, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Sliding, Window
from tandem.transfer.codec import encode_runs
from tandem.transfer.errors import InvalidPositionMap
from tandem.transfer.wire_map import decode_map, encode_map
from tests.support.kinds import changed
from tests.transfer.layouts import compressed, two_groups

LAYOUT = two_groups()
NUM_PAGES = 10  # 40 slots
ENDLESS = SlotRuns(np.array([0], np.int32), np.array([1 << 30], np.int32))


def position_map(*slots: list[int], start: int = 8) -> PositionMap:
    return PositionMap(start, tuple(SlotRuns.from_slots(group) for group in slots))


GOOD = position_map([20, 21, 22, 23, 4, 5], [0, 1, 2, 3, 38, 39])


def test_a_map_survives_the_wire() -> None:
    wire = encode_map(GOOD, LAYOUT)
    assert decode_map(wire, LAYOUT, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6) == GOOD


def test_the_map_of_a_sequence_that_slides_skips_what_its_window_does_not_show() -> None:
    """A window of 5 after 9 positions shows 8 and 12 … 13 of positions 8 … 13."""
    runs = SlotRuns.from_slots([3, SKIP, SKIP, SKIP, 5, 6])
    wanted = PositionMap(8, (runs, runs), Sliding(11, 9, rotated=14))
    pages: dict[str, Any] = {"num_pages": (NUM_PAGES,) * 2, "expected_start": 8, "expected_tokens": 6}
    assert decode_map(encode_map(wanted, LAYOUT), LAYOUT, **pages) == wanted
    for sliding, message in (
        (Sliding(12, 9), r"runs\[0\] skips positions 9 … 11; a window of 12 behind 9 lets go of 9 … 10 only"),
        (Sliding(14, 10), "skips positions 9 … 11; a window of 14 behind 10"),
        (Sliding(9, 9), "sliding has a sink of 9; it must be from 0 to 8"),
        (None, r"runs\[0\] skips 3 positions; it must skip the first 0 and no others"),
    ):
        with pytest.raises(InvalidPositionMap, match=message):
            decode_map(encode_map(replace(wanted, sliding=sliding), LAYOUT), LAYOUT, **pages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 8}, "page_size is 8; 4 is expected"),
        ({"layout_fingerprint": 7}, "layout_fingerprint is 0x0000000000000007"),
        ({"num_tokens": 7}, "num_tokens is 7; 6 is expected"),
        ({"start_position": 9}, "start_position is 9; 8 is expected"),
        ({"runs": ()}, "runs holds 0 layer groups; the layout has 2"),
        ({"runs": (encode_runs(SlotRuns.from_slots([1])),) * 2}, r"runs\[0\] holds 1 positions; 6 are expected"),
        ({"runs": (encode_runs(ENDLESS),) * 2}, r"runs\[0\]: runs hold 1073741824 positions; at most 6 are expected"),
        ({"runs": (b"\x07",) * 2}, "version is 7"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    wire = replace(encode_map(GOOD, LAYOUT), **change)
    with pytest.raises(InvalidPositionMap, match=message):
        decode_map(wire, LAYOUT, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6)


def test_the_layout_of_another_model_is_refused() -> None:
    wire = encode_map(GOOD, two_groups(torch.bfloat16))
    with pytest.raises(InvalidPositionMap, match="layout_fingerprint"):
        decode_map(wire, LAYOUT, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([20, 21, 22, 23, 39, 40], "pool has 0 … 39"),
        ([20, 21, SKIP, 23, 4, 5], r"runs\[1\] skips 1 positions; it must skip the first 0 and no others"),
        ([20, 21, 22, 23, 21, 22], r"runs\[1\] holds slot 21 twice"),
        ([4, 20, 21, 22, 23, 4], r"runs\[1\] holds slot 4 twice"),
    ],
)
def test_bad_slots_are_refused(slots: list[int], message: str) -> None:
    wire = encode_map(position_map(GOOD.runs[0].slots().tolist(), slots), LAYOUT)
    with pytest.raises(InvalidPositionMap, match=message):
        decode_map(wire, LAYOUT, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6)


def test_an_empty_map_is_accepted_when_nothing_is_expected() -> None:
    empty = position_map([], [])
    wire = encode_map(empty, LAYOUT)
    assert (
        decode_map(wire, LAYOUT, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=0).num_tokens == 0
    )


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([SKIP, SKIP, SKIP, SKIP, 20, 21], None),  # of 8 … 13; from 12, where 14's page starts, a window of 1 sees 12
        ([SKIP, SKIP, SKIP, 20, 21, 22], r"runs\[0\] skips 3 positions; it must skip the first 4"),
        ([SKIP, SKIP, SKIP, SKIP, SKIP, 20], r"runs\[0\] skips 5 positions; it must skip the first 4"),
        ([SKIP, SKIP, SKIP, SKIP, 20, SKIP], r"runs\[0\] skips 5 positions; it must skip the first 4"),
        ([SKIP, SKIP, SKIP, SKIP, 20, 40], r"pool has 0 … 39"),
    ],
)
def test_with_a_window_exactly_what_is_behind_it_is_skipped(slots: list[int], message: str | None) -> None:
    first, second = LAYOUT.groups
    layout = replace(LAYOUT, groups=(changed(first, keeps=Window(1)), second))
    given = position_map(slots, GOOD.runs[1].slots().tolist())
    wire = encode_map(given, layout)
    if message is None:
        assert decode_map(wire, layout, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6) == given
        return
    with pytest.raises(InvalidPositionMap, match=message):
        decode_map(wire, layout, num_pages=(NUM_PAGES, NUM_PAGES), expected_start=8, expected_tokens=6)


def test_overlap_is_found_among_many_runs() -> None:
    slots = np.random.default_rng(0).permutation(5000).astype(np.int32)
    layout = two_groups()
    for last, accepted in ((slots[-1], True), (slots[17], False)):
        changed = np.append(slots[:-1], last).astype(np.int32)
        wire = encode_map(PositionMap(0, (SlotRuns.from_slots(changed),) * 2), layout)
        if accepted:
            decode_map(wire, layout, num_pages=(1250, 1250), expected_start=0, expected_tokens=5000)
        else:
            with pytest.raises(InvalidPositionMap, match=f"holds slot {last} twice"):
                decode_map(wire, layout, num_pages=(1250, 1250), expected_start=0, expected_tokens=5000)


EVERY = (1, 2, 8, 1)
PIECE = {"num_pages": (NUM_PAGES,) * 4, "expected_start": 6, "expected_tokens": 15}  # positions 6 … 20
SLOTS: tuple[list[int], ...] = (  # of entries 6 … 20, 3 … 9, 0 … 1 and 6 … 20
    [SKIP] * 2 + [*range(8, 21)],  # from 16, where 21's coarsest page starts, a window of 6 sees 11: its page is 8 … 11
    [7, 4, 5, 0, 1, 18, 19],
    [9, 3],
    [SKIP] * 6 + [*range(20, 29)],  # a window of 4 sees 13: 12 … 15
)


def compressed_map(*slots: list[int]) -> PositionMap:
    return PositionMap(6, tuple(map(SlotRuns.from_slots, slots)), every=EVERY)


def test_a_map_has_a_slot_for_each_entry_that_its_positions_complete() -> None:
    wanted = compressed_map(*SLOTS)
    assert decode_map(encode_map(wanted, compressed()), compressed(), **PIECE) == wanted


@pytest.mark.parametrize(
    ("group", "slots", "message"),
    [
        (0, [SKIP] * 3 + [*range(9, 21)], r"runs\[0\] skips 3 positions; it must skip the first 2"),
        (3, [SKIP] * 2 + [*range(16, 29)], r"runs\[3\] skips 2 positions; it must skip the first 6"),
        (1, [SKIP, *SLOTS[1][1:]], r"runs\[1\] skips 1 positions; it must skip the first 0"),
        (1, [*SLOTS[1][1:], 20], r"runs\[1\] holds slots 0 … 20; the pool has 0 … 19"),
        (2, [9, 10], r"runs\[2\] holds slots 9 … 10; the pool has 0 … 9"),
        (2, [3, 3], r"runs\[2\] holds slot 3 twice"),
    ],
)
def test_bad_slots_of_entries_are_refused(group: int, slots: list[int], message: str) -> None:
    wanted = compressed_map(*(slots if index == group else good for index, good in enumerate(SLOTS)))
    with pytest.raises(InvalidPositionMap, match=message):
        decode_map(encode_map(wanted, compressed()), compressed(), **PIECE)


@pytest.mark.parametrize(("group", "count", "wanted"), [(1, 8, 7), (1, 6, 7), (2, 15, 2), (0, 14, 15)])
def test_each_group_holds_as_many_entries_as_the_positions_complete(group: int, count: int, wanted: int) -> None:
    wire = encode_map(compressed_map(*SLOTS), compressed())
    runs = [
        encode_runs(SlotRuns.from_slots(range(count))) if index == group else of for index, of in enumerate(wire.runs)
    ]
    message = (
        "more than|positions; "
        if count > wanted
        else rf"runs\[{group}\] holds {count} positions; {wanted} are expected"
    )
    with pytest.raises(InvalidPositionMap, match=message):
        decode_map(replace(wire, runs=tuple(runs)), compressed(), **PIECE)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_what_a_receiver_asks_for_is_what_its_sender_expects(lengths: list[int]) -> None:
    layout, pages = compressed(), 24
    pools = [torch.zeros(pages, *layout.page_shape(group), dtype=layout.stored_dtype_of(group)) for group in range(4)]
    rope = RopeParameters("none", 8)
    cache = PagedKVCache(layout, pools, max_sequences=1, max_sequence_length=80, rope=rope, writer=None)
    cache.add_sequence(0)
    for length in lengths:
        start, wanted = cache.sequence(0).num_tokens, cache.prepare_receive(0, length)
        cache.finish_receive(0)
        found = decode_map(
            encode_map(wanted, layout), layout, num_pages=(pages,) * 4, expected_start=start, expected_tokens=length
        )
        assert found == wanted
        for group, (runs, every) in enumerate(zip(found.runs, EVERY, strict=True)):
            entries = range(start // every, (start + length) // every)
            first = layout.first_page_index(group, start + length) * layout.paging[group].entries
            assert np.count_nonzero(runs.slots() != SKIP) == len([entry for entry in entries if entry >= first])
