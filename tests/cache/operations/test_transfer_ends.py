"""prepare_receive and mark_send: what one cache computes stands in another, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tests.cache.island import Island, forward
from tests.cache.naive import (
    ROPE,
    assert_same_kv,
    layout_of,
    pools_of,
    windowed,
)
from tests.support.tvm_cache import TvmCache

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
def test_all_that_is_cached_can_go_without_a_forward(layout: KVLayout, begin: int) -> None:
    island = Island.of(layout)
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    if begin:
        forward(receiver, 0, begin)
    position_map = receiver.prepare_receive(0, 14 - begin)
    forward(sender, 0, 14)
    sender.mark_send(0, begin, position_map, 1)
    sender.send_cached(0)
    assert sender.sends_done(0)
    assert sender.num_sent(0) == 14 - begin
    assert sender.bytes_sent(0) == (14 - begin) * layout.token_bytes
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, begin, 14)
    assert not island.writer.token_writes
    for count in (1, 2):  # the next forwards send nothing any more
        forward(sender, 0, count)
    assert sum(slots for _, group, slots in island.writer.slot_writes if group == 0) == 14 - begin


@pytest.mark.parametrize("layout", [LAYOUT, TWO_GROUPS, layout_of(2, dtype=torch.bfloat16)])
@pytest.mark.parametrize("begin", [0, 2, 7])
@pytest.mark.parametrize("pushed", [(), (2,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_chunks_go_page_to_page_or_with_their_forwards(layout: KVLayout, begin: int, pushed: tuple[int, ...]) -> None:
    """Some of four forwards push what they compute, and what is left of the forwards before."""
    island = Island.of(layout)
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    if begin:
        forward(receiver, 0, begin)
    sender.mark_send(0, begin, receiver.prepare_receive(0, 14 - begin), 1)
    for index, (first, end) in enumerate(pairwise((0, 5, 8, 9, 14))):
        forward(sender, 0, end - first, seed=index, push=index in pushed)
        if index in (1, 3):
            sender.send_cached(0)
            assert sender.num_sent(0) == end - begin
        elif index not in pushed:
            assert sender.num_sent(0) <= max(first - begin, 0)
    assert sender.sends_done(0)
    sender.send_cached(0)  # nothing
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, begin, 14)
    by_token = sum(tokens for _, group, layer, tokens in island.writer.token_writes if (group, layer) == (0, 1))
    by_page = sum(slots for _, group, slots in island.writer.slot_writes if group == 0)
    chunks = [(0, 5), (5, 8), (8, 9), (9, 14)]
    assert by_token == sum(max(end - max(first, begin), 0) for first, end in (chunks[index] for index in pushed))
    assert by_page == 14 - begin - by_token


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
    for slots in ([-1, 95, 96], [(1 << 31) - 2, (1 << 31) - 1]):
        with pytest.raises(InvalidArgument, match=f"slot {slots[-1]} for layer group 0; the pool of PE 1 ends at 95"):
            sender.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(slots),)), 1)
    sender.mark_send(0, 0, position_map, 1)
    with pytest.raises(InvalidArgument, match="sequence 0 is marked already"):
        sender.mark_send(0, 0, position_map, 1)
    forward(sender, 0, 6)
    without = TvmCache(LAYOUT, pools_of(LAYOUT, 2), max_sequences=1, max_sequence_length=8, rope=ROPE, writer=None)
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
    seen = max(  # from there, by the next query
        0, *(total - (group.keeps.window or total + 1) + 1 for group in layout.groups)
    )
    assert sender.first_position(0) <= receiver.first_position(0) <= seen
    assert_same_kv(sender, receiver, 0, 0, min(max(begin, receiver.first_position(0)), total), total)
