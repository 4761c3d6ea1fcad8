"""Pages that are kept in host memory, against a dictionary of lists that forgets its oldest."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store import copies
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tests.cache.late_lanes import LateLanes

SHAPES = ((9, 3, 1, 2), (12, 7))  # the pages of the second are no whole number of words
SLOTS = (4, 3)


def pools_of() -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, (torch.float32, torch.int8), strict=True)]


def named(group: int, names: list[int], pages: list[int]) -> NamedPages:
    return NamedPages(group, [bytes([name]) for name in names], np.array(pages, np.int32))


def test_a_page_that_changed_is_not_found_again() -> None:
    """Also where it changed on another rank alone, by what all of them say."""
    pools = pools_of()
    told = list[int]()

    def agree(word: int) -> int:
        told.append(word)
        return word + (len(told) == 4)  # the second page of the three is bad elsewhere

    store = HostStore(pools, SLOTS, verify=True, agree=agree)
    pools[0][:3] = torch.arange(18.0).view(3, 3, 1, 2)
    wanted = named(0, [1, 2, 3], [0, 1, 2])
    store.put(wanted)
    (found,) = store.fetch([wanted])
    assert found.all()
    assert told == [0]
    store.memory.shelves[0][0, :4] += 1
    (found,) = store.fetch([wanted])
    assert found.tolist() == [False, False, True]
    assert told == [0, 1, 1, 0, 0]
    assert store.find(0, wanted.digests).tolist() == [False, False, True]
    assert (store.counts.bad_pages, store.counts.pages_up, store.counts.hits) == (2, 4, 2)


def test_two_words_that_changed_places_are_noticed() -> None:
    pools = pools_of()
    store = HostStore(pools, SLOTS, verify=True)
    pools[0][0] = torch.arange(6.0).view(3, 1, 2)
    wanted = named(0, [1], [0])
    store.put(wanted)
    words = store.memory.shelves[0][0, :16].view(torch.int64)
    words[:] = words.flip(0)
    assert not store.fetch([wanted])[0].any()


def late_store(pools: list[torch.Tensor]) -> tuple[HostStore, LateLanes]:
    """Makes a store whose copies are made once they are waited for."""
    made: list[LateLanes] = []

    def make(*of: Any) -> LateLanes:
        made.append(LateLanes(*of))
        return made[0]

    store = HostStore(pools, SLOTS, layers=[[0, 1, 2], [0]], begins=[0, 2], make_lanes=make)
    return store, made[0]


def test_a_peer_waits_for_copies_in_both_directions() -> None:
    """A page that was fetched, evicted and given to a peer is written by a copy that is still queued."""
    store, lanes = late_store(pools_of())
    assert store.copies.mark() is None
    store.put(named(0, [1], [0]))
    down = store.copies.mark()
    assert down is not None
    store.fetch([named(0, [1], [1])])
    store.put(named(0, [1], [1]))
    both = store.copies.mark()
    assert both is not None
    lanes.made[0].finish()
    assert (down(), both()) == (True, False)
    lanes.made[1].finish()
    assert both()
    assert store.copies.mark() is None


def test_a_page_comes_up_layer_by_layer() -> None:
    pools = pools_of()
    store, _ = late_store(pools)
    pools[0][0] = torch.arange(1.0, 7.0).view(3, 1, 2)
    store.put(named(0, [1], [0]))
    store.fetch([named(0, [1], [5])])
    arrivals = store.copies.arrivals(store.copies.newest(0, np.array([5], np.int32)))
    assert arrivals is not None
    assert pools[0][5].flatten().tolist() == [0.0] * 6
    arrivals.wait(1)
    assert pools[0][5].flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]
    arrivals.wait(2)
    assert torch.equal(pools[0][5], pools[0][0])
    assert store.copies.newest(0, np.array([5], np.int32)) == 1 + 1
    assert not store.copies.pending
    assert store.copies.arrivals(2) is None


def test_a_slot_is_read_before_it_is_filled_again() -> None:
    """A page comes up while its slot is given to the next one."""
    pools = pools_of()
    store, lanes = late_store(pools)
    for page in range(6):
        pools[0][page] = float(page + 1)
    store.put(named(0, [1, 2, 3, 4], [0, 1, 2, 3]))
    store.fetch([named(0, [1], [7])])
    store.put(named(0, [5], [4]))
    lanes.made[-1].finish()
    assert pools[0][7].eq(1).all()


def test_what_follows_a_page_comes_up_with_it() -> None:
    """A copy of a page within the pool, as of a snapshot, is made once that page is there."""
    pools = pools_of()
    store, _ = late_store(pools)
    pools[0][0] = 5.0
    store.put(named(0, [1], [0]))
    store.fetch([named(0, [1], [6])])
    source, target = np.array([6], np.int32), np.array([8], np.int32)
    store.copies.follow(0, source, target, partial(pools[0].__setitem__, 8, pools[0][6]))
    store.copies.wait_until(store.copies.newest(0, target))
    assert pools[0][8].eq(5).all()
    assert not store.copies.pending
    store.copies.follow(0, target, source, partial(pools[0].__setitem__, 6, 0))  # nothing is under way
    assert pools[0][6].eq(0).all()


def test_the_rate_is_that_of_copies_up() -> None:
    """Among late copies those count most that moved most bytes."""
    pools = pools_of()
    store = HostStore(pools, SLOTS)
    store.put(named(0, [1, 2, 3], [0, 1, 2]))
    assert store.copies.rate == 0
    lanes: Any = store.copies._lanes
    seconds = iter([2.0, 5.0])
    copy = lanes.copy
    lanes.copy = lambda *of, **options: copy(*of, **options)._replace(seconds=next(seconds))
    store.fetch([named(0, [1, 2, 3], [5, 6, 7])])
    assert store.copies.rate == 3 * 24 / 2
    store.fetch([named(0, [1], [5])])
    assert store.copies.rate == pytest.approx((0.8 * 72 + 24) / (0.8 * 2 + 5))


def test_no_more_is_under_way_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = pools_of()
    monkeypatch.setattr(copies, "MOST_BYTES", 2 * pools[0][0].nbytes)
    store, lanes = late_store(pools)
    for number in range(4):
        store.put(named(0, [number], [number]))
    assert [copy.is_done() for copy in lanes.made] == [True, True, False, False]


def test_more_memory_than_there_is_is_refused_at_once() -> None:
    """Nothing grows with the number of slots before."""
    with pytest.raises(MemoryError, match=r"^cache\.host_bytes: this host has no \d+ bytes left"):
        HostStore(pools_of(), (1 << 45, 3))


def test_a_shelf_without_slots_keeps_nothing() -> None:
    store = HostStore(pools_of(), (0, 3))
    store.put(named(0, [1, 2], [0, 1]))
    assert not store.find(0, [b"\1", b"\2"]).any()
    assert store.counts.pages_down == 0
    with pytest.raises(InvalidArgument, match=r"num_slots is \(1, -1\); it must be 2 counts of at least 0"):
        HostStore(pools_of(), (1, -1))
