"""prepare_receive and mark_send in layouts with windows: what has left a window does not travel."""

from itertools import pairwise

import pytest

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.transfer.wire_map import decode_map, encode_map
from tests.cache.island import Island, forward
from tests.cache.naive import (
    HEAD_DIM,
    NaiveCache,
    assert_same_kv,
    draw_inputs,
    layout_of,
    run,
    windowed,
)
from tests.support.tolerances import assert_close

LAYOUT = layout_of(2)
WINDOWS = windowed(layout_of(1, 4), None, 6)


@pytest.mark.parametrize("cached", [0, 3, 17])
@pytest.mark.parametrize("begin", [0, 2, 14])
def test_only_what_a_window_holds_at_the_end_travels(cached: int, begin: int) -> None:
    """The second group of the receiver keeps positions from 12 on of 21: the page of 20 - 5 and later ones."""
    island = Island.of(WINDOWS)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    naive = NaiveCache(WINDOWS)
    naive.add(0)
    inputs = draw_inputs(WINDOWS, 21, seed=0)

    def send(first: int, end: int) -> None:
        run(sender, [0], [end - first], inputs.between(first, end))

    if begin:
        run(receiver, [0], [begin], inputs.between(0, begin))
    if cached:
        send(0, cached)
    receiver.reserve(0, 30, 1)
    position_map = receiver.prepare_receive(0, 21 - begin)
    assert [runs.num_skipped for runs in position_map.runs] == [0, max(12 - begin, 0)]
    wire = encode_map(position_map, WINDOWS)
    expected = {"num_pages": (24,) * len(WINDOWS.groups), "expected_start": begin, "expected_tokens": 21 - begin}
    sender.mark_send(0, begin, decode_map(wire, WINDOWS, **expected), 1)
    for first, end in pairwise(sorted({cached, 9 if cached < 9 else 18, 20, 21})):
        send(first, end)
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    naive.run([0], [21], inputs)
    assert_same_kv(sender, receiver, 0, 0, 12, 21)
    sent = {group: 0 for group in range(2)}
    for _, group, slots in island.writer.slot_writes:
        sent[group] += slots
    for _, group, layer, tokens in island.writer.token_writes:
        sent[group] += tokens if layer in (0, 1) and layer == min(WINDOWS.groups[group].layers) else 0
    in_window = 21 - max(12, begin)
    assert sent == {0: 21 - begin, 1: in_window}
    assert sender.bytes_sent(0) == ((21 - begin) * 2 * 2 * 1 + in_window * 2 * 2 * 4) * HEAD_DIM * 4
    for step in range(1, 9):
        batch = ([0], [1], draw_inputs(WINDOWS, 1, seed=step))
        for actual, expected_o in zip(run(receiver, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected_o)


def test_a_sender_frees_behind_its_window_while_it_sends() -> None:
    island = Island.of(windowed(LAYOUT, 6), num_pages=4)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    sender.reserve(0, 60, 4)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 60), 1)
    for step in range(15):
        forward(sender, 0, 4, seed=step)
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 52, 60)
    assert receiver.num_free_pages == 2


def test_a_map_of_what_has_left_the_window_is_refused() -> None:
    island = Island.of(WINDOWS)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    position_map = receiver.prepare_receive(0, 3)
    forward(sender, 0, 20)
    forward(sender, 0, 1)
    whole = PositionMap(0, tuple(SlotRuns.from_slots(range(30)) for _ in range(2)))
    with pytest.raises(InvalidArgument, match="asks for position 0 of layer group 1; those before 12 have left"):
        sender.mark_send(0, 0, whole, 1)
    receiver.finish_receive(0)
    receiver.mark_send(0, 0, PositionMap(0, whole.runs), 1)
    with pytest.raises(InvalidArgument, match="with windows it receives only afterwards"):
        receiver.prepare_receive(0, 3)
    assert position_map.num_tokens == 3


def test_what_is_yet_to_be_sent_does_not_leave_a_window() -> None:
    """The page might be another sequence's before it is read."""
    island = Island.of(WINDOWS)
    sender, receiver = island.caches
    for sequence in range(2):
        for cache in island.caches:
            cache.add_sequence(sequence)
    forward(sender, 0, 14)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 10), 1)
    every = PositionMap(3, tuple(SlotRuns.from_slots(range(40, 67)) for _ in WINDOWS.groups))
    sender.mark_send(1, 3, every, 1)
    forward(sender, 1, 20, push=False)
    for sequence, position, length in ((0, 0, 14), (1, 3, 20)):
        message = f"sequence {sequence} is to send position {position}, which would leave the window of layer group 1"
        with pytest.raises(InvalidArgument, match=message):
            forward(sender, sequence, 1)
        assert sender.num_tokens(sequence) == length
        sender.send_cached(sequence)
    assert_same_kv(sender, receiver, 0, 0, 4, 10)
    for sequence in range(2):
        forward(sender, sequence, 10)
        assert sender.sends_done(sequence)


def test_what_a_window_still_holds_is_sent_with_the_forward() -> None:
    """The forward drops what is before position 4, or all that a map skips."""
    island = Island.of(WINDOWS)
    sender, receiver = island.caches
    for sequence in range(3):
        for cache in island.caches:
            cache.add_sequence(sequence)
    forward(sender, 0, 12)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 12), 1)
    nowhere = SlotRuns.from_slots([-1] * 10)
    forward(sender, 1, 20)
    sender.mark_send(1, 0, PositionMap(0, (receiver.prepare_receive(1, 10).runs[0], nowhere)), 1)
    sender.mark_send(2, 0, PositionMap(0, (SlotRuns.from_slots(range(60, 70)),) * 2), 1)
    for sequence in range(2):
        forward(sender, sequence, 1)
        assert sender.sends_done(sequence)
    assert_same_kv(sender, receiver, 0, 0, 4, 10)
