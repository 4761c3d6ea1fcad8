"""Parked sequences, whose copies share lanes with those of evicted pages: made when somebody waits for them."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.copies import DirectLanes
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tandem.cache.store.parked_store import ParkedStore
from tests.cache.late_lanes import LateLanes
from tests.cache.naive import pools_of
from tests.cache.oracle import cache_of
from tests.cache.peer_writer import PeerWriter
from tests.cache.settings import PLAIN, SETTINGS


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
    assert host.copies.num_bytes == 2 * pool[0].nbytes
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


def test_a_store_owns_its_memory() -> None:
    """Lanes on a GPU keep addresses, so nothing else holds the memory that they copy to."""
    held: list[weakref.ref[Tensor]] = []

    def make_lanes(pools: Sequence[Tensor], memory: Sequence[Tensor], *_: object) -> DirectLanes:
        held.extend(map(weakref.ref, memory))
        return DirectLanes()

    store = ParkedStore(pools_of(PLAIN, 4), [4, 4], make_lanes=make_lanes)
    gc.collect()
    assert len(held) == 2
    assert all(one() is not None for one in held)
    del store
    gc.collect()
    assert all(one() is None for one in held)
