import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.plan.position_map import SKIP, SlotRuns
from tandem.transfer.codec import GAPS, MAX_SLOT, PATCHED, VERSION, decode_runs, encode_runs
from tandem.transfer.errors import InvalidPositionMap

run = st.tuples(
    st.one_of(st.integers(SKIP, 40), st.integers(SKIP, MAX_SLOT - 2**20)), st.one_of(st.integers(1, 40), st.just(2**20))
)


def make(pairs: list[tuple[int, int]]) -> SlotRuns:
    array = np.array(pairs, np.int32).reshape(-1, 2)
    return SlotRuns(array[:, 0].copy(), array[:, 1].copy())


def page_slots(pages: np.ndarray, page_size: int = 16) -> np.ndarray:
    return (pages[:, None] * page_size + np.arange(page_size)).ravel().astype(np.int32)


@settings(max_examples=100, deadline=None)
@given(st.lists(run, max_size=40))
def test_any_runs_round_trip(pairs: list[tuple[int, int]]) -> None:
    runs = make(pairs)
    assert decode_runs(encode_runs(runs), max_tokens=runs.num_tokens) == runs


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(SKIP, 200), max_size=100))
def test_any_slots_round_trip(slots: list[int]) -> None:
    decoded = decode_runs(encode_runs(SlotRuns.from_slots(slots)), max_tokens=len(slots))
    assert decoded.slots().tolist() == slots


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=200, unique=True),
    st.integers(0, 15),
    st.integers(0, 15),
    st.booleans(),
)
def test_pages_with_partial_ends_round_trip(pages: list[int], lead: int, trail: int, ascending: bool) -> None:
    slots = page_slots(np.array(sorted(pages) if ascending else pages))[lead:]
    slots = slots[: max(1, slots.size - trail)]
    assert np.array_equal(decode_runs(encode_runs(SlotRuns.from_slots(slots)), max_tokens=slots.size).slots(), slots)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (MAX_SLOT, 1), (0, 1), (MAX_SLOT, 1), (0, 1)],
        [(MAX_SLOT, 1), (0, MAX_SLOT), (SKIP, 1), (1, MAX_SLOT - 1), (0, 1)],
        [(SKIP, 5), (SKIP, 5), (SKIP, 5)],
        [(16 * 3, 16)] * 7,
    ],
)
def test_extreme_runs_round_trip(pairs: list[tuple[int, int]]) -> None:
    runs = make(pairs)
    assert decode_runs(encode_runs(runs), max_tokens=runs.num_tokens) == runs


def test_fresh_pages_take_a_few_bytes() -> None:
    runs = SlotRuns.from_slots(np.arange(1_000_000, 1_000_000 + 32_768))
    assert len(encode_runs(runs)) <= 12


def test_fragmented_fresh_pages_take_a_few_bytes_a_run() -> None:
    slots = np.concatenate([np.arange(begin, begin + 4096) for begin in range(4096 * 5, 4096 * 21, 4096 * 2)])
    assert len(encode_runs(SlotRuns.from_slots(slots))) <= 40


@pytest.mark.parametrize("seed", range(20))
def test_random_pages_take_a_thirtieth_of_the_raw_slots(seed: int) -> None:
    pages = np.random.default_rng(seed).choice(65_536, 2048, replace=False)
    pages[100:102] = pages[100], (pages[100] + 1) % 65_536  # neighbours now and then: a longer run
    slots = page_slots(pages)
    data = encode_runs(SlotRuns.from_slots(slots))
    assert len(data) * 30 <= slots.nbytes
    assert np.array_equal(decode_runs(data, max_tokens=slots.size).slots(), slots)


def test_sorted_pages_take_less_than_unsorted_ones() -> None:
    pages = np.random.default_rng(0).choice(65_536, 2048, replace=False)
    unsorted = len(encode_runs(SlotRuns.from_slots(page_slots(pages))))
    assert len(encode_runs(SlotRuns.from_slots(page_slots(np.sort(pages))))) < 0.6 * unsorted


SAMPLES = [
    make([]),
    make([(5, 11)]),
    make([(5, 11), (SKIP, 3)]),
    make([(5, 11), (32, 16), (96, 16), (64, 16), (128, 3)]),
    make([(0, 7), *((16 * (page * 5 // 2), 16) for page in range(1, 200)), (16 * 500, 16 * 900), (9, 1)]),
]


@pytest.mark.parametrize("runs", SAMPLES)
def test_truncated_and_longer_bytes_are_refused(runs: SlotRuns) -> None:
    data = encode_runs(runs)
    for size in range(len(data)):
        with pytest.raises(InvalidPositionMap):
            decode_runs(data[:size], max_tokens=runs.num_tokens)
    with pytest.raises(InvalidPositionMap, match="1 bytes follow"):
        decode_runs(data + b"\0", max_tokens=runs.num_tokens)


@pytest.mark.parametrize("runs", SAMPLES[1:])
def test_more_positions_than_expected_are_refused(runs: SlotRuns) -> None:
    with pytest.raises(InvalidPositionMap, match=f"at most {runs.num_tokens - 1}"):
        decode_runs(encode_runs(runs), max_tokens=runs.num_tokens - 1)


def test_the_samples_reach_every_form() -> None:
    encoded = [encode_runs(runs) for runs in SAMPLES]
    assert encoded[4][0] & GAPS
    assert encoded[4][7] & PATCHED  # the lengths column follows version, count and two runs of two bytes each


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SAMPLES[1:]), st.data())
def test_damaged_bytes_are_refused_or_decode_within_bounds(runs: SlotRuns, data: st.DataObject) -> None:
    damaged = bytearray(encode_runs(runs))
    index = data.draw(st.integers(0, len(damaged) - 1))
    damaged[index] ^= data.draw(st.integers(1, 255))
    check_bounded(bytes(damaged))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_arbitrary_bytes_are_refused_or_decode_within_bounds(tail: bytes, gaps: bool) -> None:
    check_bounded(bytes((VERSION | gaps * GAPS,)) + tail)


def check_bounded(data: bytes) -> None:
    try:
        runs = decode_runs(data, max_tokens=70_000)
    except InvalidPositionMap:
        return
    assert runs.num_tokens <= 70_000
    assert not runs.begins.size or int((runs.begins.astype(np.int64) + runs.lengths).max()) - 1 <= MAX_SLOT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "version needs 1 bytes"),
        (b"\x02\x00", "version is 2; 1 is understood"),
        (b"\x81\x00", "gaps flag"),
        (b"\x01\x80\x00", "overlong"),
        (b"\x01" + b"\xff" * 6 + b"\x00", "more than 6 bytes"),
        (b"\x01\x01\x05\x00", "length is 0"),
        (b"\x01\x01\x80\x80\x80\x80\x08\x02", f"the largest slot is {MAX_SLOT}"),
        (b"\x01\x01\x00\x80\x80\x80\x80\x08", "length is 2147483648"),
        (b"\x01\x03\x05\x01\x09\x01\x00\x00\x01\x00\x0c\x01", "lengths are 0"),
        (b"\x01\x03\x05\x01\x09\x01\x00\x02\x01\x00\x03\x01", "begins at -2"),
        (b"\x01\x03\x05\x01\x09\x01\x00\x04\x01\x00\xfe\xff\xff\xff\x0f\x01", f"the largest slot is {MAX_SLOT}"),
        (b"\x01\x03\x05\x01\x09\x01\x21\x00\x01", "column begins with byte 33"),
        (b"\x01\x03\x05\x01\x09\x01\x00\x02\x00\x00\x0c\x01", "column reaches"),
        (b"\x01\x03\x05\x01\x09\x01\x01\x02\x01\x02\x00\x0c\x01", "padding"),
    ],
)
def test_errors_say_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(InvalidPositionMap, match=message):
        decode_runs(data, max_tokens=1000)


def test_a_count_bomb_costs_no_more_than_the_expected_tokens() -> None:
    bomb = b"\x01\xff\xff\xff\xff\x7f\x01\x01\x01\x01\x00\x02\x01\x00\x02\x01"
    with pytest.raises(InvalidPositionMap, match=r"num_runs is \d+; at most 1000 "):
        decode_runs(bomb, max_tokens=1000)


@pytest.mark.parametrize("others", [0, 1])
def test_encoding_refuses_a_run_beyond_int32(others: int) -> None:
    with pytest.raises(InvalidPositionMap, match="ends at slot"):
        encode_runs(make([(5, 1)] * others + [(MAX_SLOT, 2)] + [(9, 1)] * others))
