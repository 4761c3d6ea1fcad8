"""Parked sequences, whose copies share lanes with those of evicted pages: made when somebody waits for them."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store import copies, parked_store
from tandem.cache.store.copies import MadeCopy
from tandem.cache.store.host_memory import OS_PAGE, HostMemory
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tandem.cache.store.parked_store import ParkedStore
from tests.cache.late_lanes import LateLanes
from tests.cache.naive import pools_of
from tests.cache.oracle import cache_of
from tests.cache.peer_writer import PeerWriter
from tests.cache.settings import PLAIN, SETTINGS
from tests.cache.store.pinning import Driver, pin_by


def ids(*pages: int) -> list[Int32Array]:
    return [np.array(pages, np.int32)]


def filled_pool(pages: int = 8) -> torch.Tensor:
    return torch.arange(1.0, pages + 1).repeat_interleave(6).view(pages, 3, 2)


def test_a_page_goes_down_once_it_has_come_up() -> None:
    """A sequence that resumes and is parked again before anything has read it."""
    pool = filled_pool()
    store = ParkedStore([pool], [4], make_lanes=LateLanes)
    store.put(1, ids(0))
    store.fetch(1, ids(5))
    store.put(2, ids(5))
    store.fetch(2, ids(7))
    store.copies.wait_for(0, ids(7)[0])
    assert pool[7].eq(1).all()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_stores_copy_on_the_same_lanes(order: Sequence[int]) -> None:
    """The page with number 0 of both memories is another one."""
    pool = filled_pool()
    host = HostStore([pool], [4], layers=[[0, 1, 2]], begins=[0], make_lanes=LateLanes)
    parked = ParkedStore([pool], [4], host.copies)
    host.put(NamedPages(0, [b"1"], ids(0)[0]))
    parked.put(1, ids(1))
    assert [host.copies.num_bytes(number) for number in (0, 1)] == [pool[0].nbytes] * 2
    fetches = [lambda: host.fetch([NamedPages(0, [b"1"], ids(6)[0])]), lambda: parked.fetch(1, ids(7))]
    for which in order:
        fetches[which]()
    assert pool[6:].flatten().tolist() == [7.0] * 6 + [8.0] * 6
    host.copies.wait_for(0, ids(6, 7)[0])
    assert pool[6:].flatten().tolist() == [1.0] * 6 + [2.0] * 6
    assert host.copies.mark() is None


def test_a_second_store_has_the_copies_of_the_first() -> None:
    pools = pools_of(PLAIN, 4)
    cache = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    cache.keep_evicted(HostStore(pools, [4, 4]))
    with pytest.raises(InvalidArgument, match="it must have those of the store of keep_evicted"):
        cache.keep_parked(ParkedStore(pools, [4, 4]))


def test_a_cache_ends_after_its_copies() -> None:
    """Its pools and the memory of its stores end next, and lanes on a GPU would go on copying."""
    pools = pools_of(PLAIN, 4)
    cache = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    host = HostStore(pools, [4, 4], make_lanes=LateLanes)
    parked = ParkedStore(pools, [4, 4], host.copies)
    cache.keep_evicted(host)
    cache.keep_parked(parked)
    parked.put(1, [*ids(0), *ids(1)])
    assert cache.bytes_in_copies
    cache.close()
    assert not cache.bytes_in_copies


def test_copies_of_prefixes_hold_up_no_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store has a bound of its own, and only a store's own copies count."""
    pools = pools_of(PLAIN, 8)
    cache = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    made: list[LateLanes] = []

    def make_lanes(*of: Any) -> LateLanes:
        made.append(LateLanes(*of))
        return made[-1]

    host = HostStore(pools, [4, 4], make_lanes=make_lanes)
    parked = ParkedStore(pools, [4, 4], host.copies)
    cache.keep_evicted(host)
    cache.keep_parked(parked)
    monkeypatch.setattr(copies, "MOST_BYTES", 2 * pools[0][0].nbytes)
    for page in range(2):
        host.put(NamedPages(0, [bytes([page])], ids(page)[0]))
    assert cache.bytes_in_copies == 0
    for page in (5, 6):
        parked.put(page, [*ids(page), *ids()])
    assert cache.bytes_in_copies == 2 * pools[0][0].nbytes
    assert not any(copy.is_done() for copy in made[0].made)
    cache.close()


def test_the_rate_that_prices_prefixes_counts_no_parked_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked sequence comes back in one copy of all its pages, which takes another time than a prefix does."""
    pool = filled_pool()
    host = HostStore([pool], [4])
    parked = ParkedStore([pool], [4], host.copies)
    monkeypatch.setattr(copies, "MadeCopy", lambda _: MadeCopy(2.0))
    parked.put(1, ids(0, 1))
    parked.fetch(1, ids(2, 3))
    assert host.copies.rate == 0
    host.put(NamedPages(0, [b"1"], ids(0)[0]))
    host.fetch([NamedPages(0, [b"1"], ids(6)[0])])
    parked.fetch(1, ids(4, 5))
    assert host.copies.rate == pool[0].nbytes / 2


def large_pool(pages: int = 8) -> torch.Tensor:
    """Its pages have the size of a page of the system."""
    return torch.arange(1.0, pages + 1).repeat_interleave(OS_PAGE // 4).view(pages, 1, -1)


def pinned_by(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, pools: Sequence[Tensor], slots: Sequence[int]
) -> ParkedStore:
    """A store as on a GPU, whose copies are made at once."""
    pin_by(driver, monkeypatch)

    def for_gpu(num_slots: Sequence[int], slot_bytes: Sequence[int], _: torch.device, setting: str) -> HostMemory:
        return HostMemory(num_slots, slot_bytes, torch.device("cuda"), setting)

    monkeypatch.setattr(parked_store, "HostMemory", for_gpu)
    return ParkedStore(pools, slots)


def test_a_store_has_room_where_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pool = Driver(early=1), large_pool()
    store = pinned_by(driver, monkeypatch, [pool], [6])
    try:
        store.memory.await_slot(0, 3)
        assert (store.fits([4]), store.fits([5]), store.has_room([6]), store.has_room([7])) == (
            True,
            False,
            True,
            False,
        )
        assert store.counts == (0, 0, 4 * OS_PAGE)
        store.put(1, ids(0, 1))
        store.put(2, ids(2, 3))
        assert (store.fits([0]), store.fits([1]), store.has_room([2])) == (True, False, True)
        store.drop(1)
        store.put(3, ids(4, 5))  # lowest first: its slots are pinned
        assert store.counts == (2, 4 * OS_PAGE, 4 * OS_PAGE)
    finally:
        driver.goes_on.set()
    store.memory.await_slot(0, 5)
    assert (store.fits([2]), store.counts) == (True, (2, 4 * OS_PAGE, 6 * OS_PAGE))
    store.put(4, ids(0, 1))
    for sequence, found in ((2, [3, 4]), (3, [5, 6]), (4, [1, 2])):
        pool[6:] = 0
        store.fetch(sequence, ids(6, 7))
        assert pool[6:, 0, ::1000].unique(dim=1).flatten().tolist() == found


def test_a_rank_that_pins_later_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader decides by what it has pinned itself."""
    driver, pool = Driver(early=0), large_pool()
    store = pinned_by(driver, monkeypatch, [pool], [6])
    could = store.fits([1])
    parks = threading.Thread(target=store.put, args=(1, ids(0, 1, 2, 3, 4)))
    parks.start()
    driver.goes_on.set()
    parks.join()
    assert not could
    store.fetch(1, ids(3, 4, 5, 6, 7))
    assert pool[:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


def test_what_the_host_cannot_pin_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    store = pinned_by(Driver(most=1), monkeypatch, [large_pool()], [6])
    with pytest.raises(
        MemoryError,
        match=rf"^cache\.parked_bytes: of {6 * OS_PAGE} bytes this host could pin {4 * OS_PAGE}; set no more",
    ) as caught:
        store.put(1, ids(0, 1, 2, 3, 4))
    del caught
    assert (1 in store, store.fits([4]), store.fits([5])) == (False, True, False)
    assert store.counts == (0, 0, 4 * OS_PAGE)


def test_a_cache_parks_into_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose leader has pinned more parks all the same."""
    driver, pools = Driver(early=0), pools_of(PLAIN, 12)
    cache = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    cache.keep_parked(pinned_by(driver, monkeypatch, pools, [8, 8]))
    cache.add_sequence(1)
    cache.prepare_receive(1, 6)
    cache.finish_receive(1)
    could, before = cache.can_park(1), cache.pages.parked_bytes
    parks = threading.Thread(target=cache.park, args=(1,))
    parks.start()
    driver.goes_on.set()
    parks.join()
    assert (could, before, cache.pages.parked) == (False, 0, 1)


def test_more_memory_than_there_is_is_refused_at_once() -> None:
    with pytest.raises(MemoryError, match=r"^cache\.parked_bytes: this host has no \d+ bytes left"):
        ParkedStore([large_pool()], [1 << 40])
