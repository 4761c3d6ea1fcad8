"""Prefixes that the index evicts and a store keeps: they come back as pages that others share."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL, Window
from tandem.cache.store.host_store import HostStore
from tests.cache.late_lanes import keep_late
from tests.cache.naive import cache_of, draw_inputs, layout_of, pools_of, run, spanned
from tests.cache.pages.test_prefix_index import prefilled
from tests.cache.peer_writer import PeerWriter
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2)
A, B = list(range(100, 121)), list(range(200, 221))
WINDOWED = spanned(layout_of(1, 4), ALL, Window(6))


def with_store(layout: KVLayout = LAYOUT, slots: int = 16, num_pages: int = 6, *, verify: bool = False) -> TvmCache:
    cache = cache_of(layout, num_pages=num_pages)
    pools = [group.site.pool for group in cache._groups]
    cache.keep_evicted(HostStore(pools, [slots] * len(pools), verify=verify))
    return cache


def served(cache: TvmCache, tokens: list[int], layout: KVLayout = LAYOUT) -> int:
    """How much of a prompt was known; whatever comes back is what was computed once."""
    found = prefilled(cache, 0, tokens, layout=layout)
    first = cache.first_position(0)
    for _, v in cache.gather_kv(0, first, len(tokens)):
        assert v[:, 0, 0].tolist() == tokens[first:]
    cache.remove_sequence(0)
    return found


@pytest.mark.parametrize("layout", [LAYOUT, layout_of(1, 4), WINDOWED], ids=["one group", "two groups", "a window"])
def test_what_was_evicted_is_found(layout: KVLayout) -> None:
    cache = with_store(layout)
    assert [served(cache, prompt, layout) for prompt in (A, B, A, B, [*A[:9], 5])] == [0, 0, 20, 20, 8]
    counts = cache.pages
    assert counts.host_hits == 3
    assert counts.host_pages_up >= 10
    assert 0 < counts.host_bytes_used <= counts.host_bytes


def test_siblings_share_what_came_back() -> None:
    cache = with_store(num_pages=7)
    served(cache, A)
    served(cache, B)
    prefilled(cache, 1, A, publish=False)
    up = cache.pages.host_pages_up
    cache.add_sequence(2)
    assert cache.match_prefix(2, A) == 20
    assert cache.pages.host_pages_up == up
    first, second = (cache._table.groups[0].held(cache._table.row(one))[:5].tolist() for one in (1, 2))
    assert first == second


def test_a_peer_gets_what_came_back() -> None:
    """It gets all layers, though the forward that sends begins before the last layers are there."""
    layout = layout_of(2, 2)
    pools = [pools_of(layout, 6) for _ in range(2)]
    sender, receiver = (cache_of(layout, pools=own, writer=PeerWriter(pe, pools)) for pe, own in enumerate(pools))
    keep_late(sender, [16, 16], seed=None)
    for prompt in (A, B):
        prefilled(sender, 0, prompt, layout=layout)
        sender.remove_sequence(0)
    sender.add_sequence(1)
    assert sender.match_prefix(1, A) == 20
    assert not sender.has_arrived(1)
    receiver.add_sequence(2)
    sender.mark_send(1, 0, receiver.prepare_receive(2, 21), 1)
    inputs = draw_inputs(layout, 1, seed=0)
    for x in (tensor for layer in inputs.layers for tensor in layer):
        x.fill_(A[-1])
    run(sender, [1], [1], inputs)
    assert sender.has_arrived(1)
    receiver.finish_receive(2)
    for _, v in receiver.gather_kv(2, 0, 21):
        assert v[:, 0, 0].tolist() == A


def test_a_salt_holds_in_the_store_too() -> None:
    cache = with_store()
    cache.add_sequence(0)
    run(cache, [0], [21], draw_inputs(LAYOUT, 21, seed=0))
    cache.publish_prefix(0, A, b"mine")
    cache.remove_sequence(0)
    served(cache, B)
    cache.add_sequence(1)
    assert cache.match_prefix(1, A) == cache.match_prefix(1, A, b"other") == 0
    assert cache.match_prefix(1, A, b"mine") == 20


def test_a_prefix_lies_in_both_places() -> None:
    """Its first pages were not evicted, and are not given up for the others."""
    cache = with_store()
    served(cache, A)
    served(cache, B[:13])  # takes three pages of A's end
    up = cache.pages.host_pages_up
    assert served(cache, A) == 20
    assert 0 < cache.pages.host_pages_up - up < 5


def test_pages_of_the_prefix_make_no_room_for_its_end() -> None:
    """The others are evicted, though these were used longer ago."""
    cache = with_store(num_pages=8)
    served(cache, A)
    cache._pools.prefixes.evict(0, 5)
    served(cache, A[:9])
    served(cache, B)
    up = cache.pages.host_pages_up
    assert served(cache, A) == 20
    assert cache.pages.host_pages_up - up == 3


def test_pages_in_use_leave_no_room_to_come_back() -> None:
    cache = with_store()
    served(cache, A)
    served(cache, B)
    cache.add_sequence(1)
    cache.reserve(1, 16)
    free = cache.num_free_pages
    cache.add_sequence(2)
    assert cache.match_prefix(2, A) == 0
    assert (cache.num_free_pages, cache.pages.host_pages_up) == (free, 0)


def test_pages_that_take_longer_than_computing_stay() -> None:
    """Pages cost bytes for each token that need not be computed. A prefix that lies in both places costs what it
    lacks."""
    cache = with_store()
    served(cache, A)
    served(cache, B)
    each = LAYOUT.page_bytes(0) // LAYOUT.page_size
    for most, found in ((each - 1, 0), (each, 20)):
        cache.add_sequence(0)
        assert cache.match_prefix(0, A, most_bytes=most) == found
        cache.remove_sequence(0)
    counts = cache.pages
    assert (counts.host_skipped_hits, counts.host_hits, counts.host_pages_up) == (1, 1, 5)


def test_a_reader_of_changes_knows_what_is_in_either_place() -> None:
    """The reader follows the changes, or begins anew."""
    cache, held, position = with_store(slots=7), set[int](), None
    for prompt in (A, B, A, [*A[:9], 5, *range(8)], B, A):
        served(cache, prompt)
        changes = cache.prefix_changes(position, stored=True)
        assert changes.whole == (position is None)
        added, removed = set(changes.added.tolist()), set(changes.removed.tolist())
        held, position = held - removed | added, changes.position
        prefixes = cache._pools.prefixes
        assert prefixes.store is not None
        digests = {*prefixes._entries, *prefixes.store.digests()}
        assert held == {int.from_bytes(digest[:8], "little") for digest in digests}
        assert held == set(cache.prefix_changes(stored=True).added.tolist())
        assert set(cache.prefix_changes().added.tolist()) <= held
    assert cache_of(LAYOUT).prefix_changes(stored=True).added.size == 0


def test_a_sequence_knows_what_came_back_for_it() -> None:
    cache = with_store()
    served(cache, A)
    served(cache, B[:13])  # takes three pages of A's end
    cache.add_sequence(3)
    assert cache.match_prefix(3, A) == 20
    assert 0 < cache.sequence(3).num_fetched < 20
    cache.add_sequence(4)
    assert cache.match_prefix(4, A) == 20
    assert cache.sequence(4).num_fetched == 0


def test_a_small_store_keeps_the_beginning() -> None:
    """The page that was used last goes first, and that is the end of a prompt."""
    cache = with_store(slots=4)
    served(cache, A)
    served(cache, B)
    assert served(cache, A) == 16
    assert cache.pages.host_bytes_used <= cache.pages.host_bytes


def test_a_bad_page_ends_the_prefix_and_is_computed_again() -> None:
    cache = with_store(verify=True)
    served(cache, A)
    served(cache, B)
    store = cache._pools.prefixes.store
    assert isinstance(store, HostStore)
    (slot,) = store._shelves[0].slots([cache._pools.prefixes.digests(np.array(A), 5)[2]])
    store.memory.shelves[0][slot] += 1
    assert served(cache, A) == 8
    assert cache.pages.host_bad_pages == 1
    served(cache, B)
    assert served(cache, A) == 20
    assert cache.pages.host_bad_pages == 1


def test_pages_in_8_bits_come_back_as_they_were() -> None:
    from tandem.cache.plan.kv_scales import KVScales

    layout = replace(LAYOUT, scales=KVScales.uniform(LAYOUT.num_layers))
    cache = with_store(layout)
    cache.add_sequence(0)
    run(cache, [0], [21], draw_inputs(layout, 21, seed=0))
    before = cache.gather_kv(0, 0, 20)
    cache.publish_prefix(0, A)
    cache.remove_sequence(0)
    cache.add_sequence(1)
    run(cache, [1], [21], draw_inputs(layout, 21, seed=1))
    cache.remove_sequence(1)
    cache.add_sequence(2)
    assert cache.match_prefix(2, A) == 20
    for old, new in zip(before, cache.gather_kv(2, 0, 20), strict=True):
        assert all(map(torch.equal, old, new))
