"""prepare_receive and mark_send: what one cache computes stands in another, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.errors import InvalidArgument, OutOfPages
from tandem.cache.layout import KVLayout
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.position_map import PositionMap, SlotRuns
from tests.cache.island import Island, forward
from tests.cache.naive import (
    ROPE,
    NaiveCache,
    assert_same_kv,
    draw_inputs,
    layout_of,
    pools_of,
    run,
    windowed,
)
from tests.tolerances import assert_close

LAYOUT = layout_of(2)
TWO_GROUPS = layout_of(1, 4)


@pytest.mark.parametrize("layout", [LAYOUT, TWO_GROUPS, layout_of(2, dtype=torch.bfloat16)])
@pytest.mark.parametrize("cached", [0, 3, 4, 9])
@pytest.mark.parametrize("begin", [0, 2, 4, 7, 11])
def test_what_arrives_is_what_the_sender_holds(layout: KVLayout, cached: int, begin: int) -> None:
    """The receiver holds `begin` positions, the sender `cached`; the rest of 14 comes in two chunks."""
    island = Island.of(layout)
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    if begin:
        forward(receiver, 0, begin)
    if cached:
        forward(sender, 0, cached)
    position_map = receiver.prepare_receive(0, 14 - begin)
    assert (position_map.start_position, position_map.end_position) == (begin, 14)
    sender.mark_send(0, begin, position_map, 1)
    for count in ((14 - cached) // 2, 14 - cached - (14 - cached) // 2):
        assert not sender.sends_done(0)
        forward(sender, 0, count, seed=count)
    assert sender.sends_done(0)
    assert sender.num_sent(0) == 14 - begin
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, begin, 14)
    paged = sum(slots for _, group, slots in island.writer.slot_writes if group == 0)
    assert paged == max(cached - begin, 0)
    pushed = sum(tokens for _, group, layer, tokens in island.writer.token_writes if (group, layer) == (0, 1))
    assert pushed == 14 - max(begin, cached)


@pytest.mark.parametrize("layout", [LAYOUT, TWO_GROUPS, layout_of(2, dtype=torch.bfloat16)])
@pytest.mark.parametrize("begin", [0, 2, 4, 7, 13])
@pytest.mark.parametrize("stored", [[], [1], [0, 1, 1, 2, 1]], ids=str)
def test_all_that_is_cached_can_go_layer_by_layer(layout: KVLayout, begin: int, stored: list[int]) -> None:
    island = Island.of(layout)
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    if begin:
        forward(receiver, 0, begin)
    position_map = receiver.prepare_receive(0, 14 - begin)
    forward(sender, 0, 13)
    with pytest.raises(InvalidArgument, match="ends at 14; sequence 0 has 13"):
        sender.send_cached(0, begin, position_map, 1)
    forward(sender, 0, 1, seed=1)
    with pytest.raises(InvalidArgument, match="must reach further than the 14"):
        sender.mark_send(0, begin, position_map, 1)
    sending = sender.send_cached(0, begin, position_map, 1)
    for num_layers in stored:
        sending.write_stored(num_layers)
        assert not sender.num_sent(0)
    sending.write_rest()
    assert sender.sends_done(0)
    assert sender.num_sent(0) == 14 - begin
    assert sender.bytes_sent(0) == (14 - begin) * layout.token_bytes
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, begin, 14)
    assert not island.writer.token_writes
    for count in (1, 2):  # the next forwards send nothing any more
        forward(sender, 0, count)
    assert sum(slots for _, group, slots in island.writer.slot_writes if group == 0) == 14 - begin


def test_the_receiver_decodes_on_as_the_sender_would() -> None:
    sender, receiver = Island.of(TWO_GROUPS).caches
    naive = NaiveCache(TWO_GROUPS)
    sender.add_sequence(0)
    receiver.add_sequence(5)
    naive.add(5)
    receiver.reserve(5, 20)
    sender.mark_send(0, 0, receiver.prepare_receive(5, 10), 1)
    forward(sender, 0, 10)
    naive.run([5], [10], draw_inputs(TWO_GROUPS, 10, seed=0))
    receiver.finish_receive(5)
    for step in range(1, 6):
        batch = ([5], [1], draw_inputs(TWO_GROUPS, 1, seed=step))
        for actual, expected in zip(run(receiver, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)


def test_several_receivers_ride_one_forward() -> None:
    """One sequence goes to PE 1 and one to PE 2, cached and computed mixed, a third stays."""
    island = Island.of(TWO_GROUPS, num_caches=3)
    sender = island.caches[0]
    for sequence in (0, 1, 2):
        sender.add_sequence(sequence)
    run(sender, [0, 1], [5, 2], draw_inputs(TWO_GROUPS, 7, seed=1))
    for sequence in (0, 1):
        receiver = island.caches[sequence + 1]
        receiver.add_sequence(9)
        sender.mark_send(sequence, 0, receiver.prepare_receive(9, 8), sequence + 1)
    run(sender, [2, 1, 0], [4, 6, 3], draw_inputs(TWO_GROUPS, 13, seed=2))
    for sequence in (0, 1):
        receiver = island.caches[sequence + 1]
        receiver.finish_receive(9)
        assert_same_kv(sender, receiver, sequence, 9, 0, 8)
    assert len(island.writer.slot_writes) == 4  # a PE and group each, not one a sequence
    assert len(island.writer.token_writes) == 8  # a PE and layer each


def test_the_mark_ends_with_the_map() -> None:
    island = Island.of(LAYOUT)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 6), 1)
    forward(sender, 0, 9)  # three positions more than the map has
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 0, 6)
    written = len(island.writer.token_writes)
    forward(sender, 0, 2)
    assert len(island.writer.token_writes) == written
    assert (sender.num_sent(0), sender.sends_done(0)) == (6, True)


def test_positions_before_the_map_are_not_sent() -> None:
    island = Island.of(LAYOUT)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    forward(receiver, 0, 10)
    kept = receiver.gather_kv(0, 0, 10)
    sender.mark_send(0, 10, receiver.prepare_receive(0, 4), 1)
    forward(sender, 0, 8, seed=1)
    assert (sender.num_sent(0), island.writer.token_writes) == (0, [])
    forward(sender, 0, 6, seed=2)
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 10, 14)
    for (k, v), (now_k, now_v) in zip(kept, receiver.gather_kv(0, 0, 10), strict=True):
        assert torch.equal(k, now_k)
        assert torch.equal(v, now_v)


def test_skipped_positions_are_not_sent() -> None:
    island = Island.of(LAYOUT)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    whole = receiver.prepare_receive(0, 8)
    before = receiver.gather_kv(0, 0, 8)
    slots = whole.runs[0].slots()
    slots[[1, 5]] = -1
    forward(sender, 0, 4)
    sender.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(slots),)), 1)
    forward(sender, 0, 4)
    receiver.finish_receive(0)
    for begin, end in ((0, 1), (2, 5), (6, 8)):
        assert_same_kv(sender, receiver, 0, 0, begin, end)
    for (k, v), (now_k, now_v) in zip(before, receiver.gather_kv(0, 0, 8), strict=True):
        torch.testing.assert_close(now_k[[1, 5]], k[[1, 5]], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(now_v[[1, 5]], v[[1, 5]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("popped", [2, 5, 8])
def test_a_mark_outlives_pop(popped: int) -> None:
    """What is appended anew is sent anew."""
    sender, receiver = Island.of(LAYOUT).caches
    sender.add_sequence(0)
    receiver.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 12), 1)
    forward(sender, 0, 8, seed=1)
    sender.pop(0, popped)
    assert sender.num_sent(0) == 8 - popped
    forward(sender, 0, 4 + popped, seed=2)
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 0, 12)


def test_nothing_counts_as_sent_before_the_forward_ended() -> None:
    sender, receiver = Island.of(LAYOUT).caches
    sender.add_sequence(0)
    receiver.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 4), 1)
    plan = sender.begin_forward([0], [4])
    assert (sender.num_sent(0), sender.sends_done(0)) == (0, False)
    sender.end_forward(plan)
    assert (sender.num_sent(0), sender.sends_done(0)) == (4, True)


def test_what_was_popped_during_a_forward_does_not_count() -> None:
    sender, receiver = Island.of(LAYOUT).caches
    sender.add_sequence(0)
    receiver.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 6), 1)
    plan = sender.begin_forward([0], [5])
    sender.pop(0, 2)
    sender.end_forward(plan)
    assert sender.num_sent(0) == 3


def test_a_forward_counts_nothing_of_who_takes_the_place_of_a_removed_sequence() -> None:
    sender, receiver = Island.of(LAYOUT).caches
    receiver.add_sequence(0)
    position_map = receiver.prepare_receive(0, 6)
    plans = []
    for sequence in range(2):
        sender.clear()
        sender.add_sequence(sequence)
        sender.mark_send(sequence, 0, position_map, 1)
        plans.append(sender.begin_forward([sequence], [4]))
    for plan, sent in zip(plans, (0, 4), strict=True):
        sender.end_forward(plan)
        assert sender.num_sent(1) == sent


def test_a_removed_receiver_drains_until_its_writer_is_quiet() -> None:
    cache = Island.of(LAYOUT, num_pages=6).caches[0]
    cache.add_sequence(0)
    forward(cache, 0, 6)
    cache.reserve(0, 20)
    cache.prepare_receive(0, 8)
    cache.remove_sequence(0)
    assert (cache.num_draining_pages, cache.num_free_pages) == (3, 3)  # pages 1, 2 and 3 of five
    with pytest.raises(InvalidArgument, match="still drains"):
        cache.add_sequence(0)
    cache.clear()
    cache.add_sequence(1)
    with pytest.raises(OutOfPages):
        cache.prepare_receive(1, 13)
    for _ in range(2):
        cache.finish_receive(0)
    assert (cache.num_draining_pages, cache.num_free_pages) == (0, 6)
    cache.add_sequence(0)


def test_finish_receive_of_a_living_sequence_keeps_its_pages() -> None:
    cache = Island.of(LAYOUT).caches[0]
    cache.add_sequence(0)
    cache.prepare_receive(0, 9)
    free = cache.num_free_pages
    for _ in range(2):
        cache.finish_receive(0)
        cache.finish_receive(77)
    assert (cache.num_free_pages, cache.num_draining_pages) == (free, 0)
    cache.remove_sequence(0)
    assert cache.num_free_pages == cache.num_pages


def test_a_shared_partial_page_is_copied_before_it_receives() -> None:
    sender, receiver = Island.of(LAYOUT).caches
    receiver.add_sequence(0)
    forward(receiver, 0, 8)
    receiver.fork_sequence(0, 1)
    receiver.pop(1, 2)
    before = receiver.gather_kv(0, 0, 8)
    sender.add_sequence(0)
    sender.mark_send(0, 6, receiver.prepare_receive(1, 4), 1)
    forward(sender, 0, 10, seed=1)
    receiver.finish_receive(1)
    assert_same_kv(sender, receiver, 0, 1, 6, 10)
    for (k, v), (now_k, now_v) in zip(before, receiver.gather_kv(0, 0, 8), strict=True):
        assert torch.equal(k, now_k)
        assert torch.equal(v, now_v)
    assert_same_kv(receiver, receiver, 0, 1, 0, 6)


def test_only_removal_touches_a_sequence_that_is_being_received() -> None:
    cache = Island.of(LAYOUT).caches[0]
    cache.add_sequence(0)
    cache.prepare_receive(0, 5)
    for call in (
        lambda: cache.begin_forward([0], [1]),
        lambda: cache.pop(0, 1),
        lambda: cache.fork_sequence(0, 1),
        lambda: cache.prepare_receive(0, 1),
        lambda: cache.publish_prefix(0, [1, 2, 3, 4, 5]),
    ):
        with pytest.raises(InvalidArgument, match="is being received"):
            call()


def test_a_map_of_fresh_pages_is_one_run() -> None:
    cache = Island.of(LAYOUT).caches[0]
    cache.add_sequence(0)
    assert cache.prepare_receive(0, 30).runs == (SlotRuns.from_slots(range(30)),)


def test_wrong_marks_are_refused() -> None:
    sender, receiver = Island.of(LAYOUT).caches
    sender.add_sequence(0)
    receiver.add_sequence(0)
    position_map = receiver.prepare_receive(0, 6)
    with pytest.raises(InvalidArgument, match="begin is 2; the position map starts at 0"):
        sender.mark_send(0, 2, position_map, 1)
    with pytest.raises(InvalidArgument, match="2 layer groups; the layout has 1"):
        sender.mark_send(0, 0, PositionMap(0, position_map.runs * 2), 1)
    with pytest.raises(InvalidArgument, match="sequence 4 is not there"):
        sender.mark_send(4, 0, position_map, 1)
    sender.mark_send(0, 0, position_map, 1)
    with pytest.raises(InvalidArgument, match="sequence 0 is marked already"):
        sender.mark_send(0, 0, position_map, 1)
    forward(sender, 0, 6)
    with pytest.raises(InvalidArgument, match="ends at 6; it must reach further than the 6"):
        sender.mark_send(0, 0, position_map, 1)
    without = PagedKVCache(LAYOUT, pools_of(LAYOUT, 2), max_sequences=1, max_sequence_length=8, rope=ROPE, writer=None)
    without.add_sequence(0)
    with pytest.raises(InvalidArgument, match="without a writer"):
        without.mark_send(0, 0, position_map, 1)


@given(st.data())
def test_any_split_of_any_prompt_lands(data: st.DataObject) -> None:
    layout = windowed(TWO_GROUPS, data.draw(st.sampled_from([None, 4])), data.draw(st.sampled_from([None, 1, 5, 8])))
    total = data.draw(st.integers(2, 30))
    begin = data.draw(st.integers(0, total - 1))
    cached = data.draw(st.integers(0, total - 1))
    cuts = sorted(data.draw(st.sets(st.integers(cached + 1, total), max_size=4)) | {cached, total})
    sender, receiver = Island.of(layout).caches
    for cache in (sender, receiver):
        cache.add_sequence(1)
        forward(cache, 1, 3)  # so that pages do not begin at 0
        cache.add_sequence(0)
    if begin:
        forward(receiver, 0, begin)
    if cached:
        forward(sender, 0, cached)
    sender.mark_send(0, begin, receiver.prepare_receive(0, total - begin), 1)
    for first, last in pairwise(cuts):
        forward(sender, 0, last - first, seed=last)
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    seen = max(
        0, *(total - (group.window or total + 1) + 1 for group in layout.groups)
    )  # from there, by the next query
    assert sender.first_position(0) <= receiver.first_position(0) <= seen
    assert_same_kv(sender, receiver, 0, 0, min(max(begin, receiver.first_position(0)), total), total)
