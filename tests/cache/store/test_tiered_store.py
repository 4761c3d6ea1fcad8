"""A disk below host memory: who waits for whom while copies are under way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.store.disk.disk_pages import DiskSpace
from tandem.cache.store.page_store import NamedPages
from tandem.cache.store.tiered_store import TieredStore
from tests.cache.late_lanes import LateLanes

SECONDS = 30.0
Made = tuple[torch.Tensor, TieredStore, LateLanes]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    """Two slots; copies are made once somebody waits for them."""
    lanes: list[LateLanes] = []

    def make(*of: Any) -> LateLanes:
        lanes.append(LateLanes(*of))
        return lanes[0]

    pool = torch.arange(1.0, 9.0).repeat_interleave(6).view(8, 3, 1, 2)
    store = TieredStore([pool], (2,), DiskSpace(tmp_path, (1 << 20,), bytes(16)), make_lanes=make)
    yield pool, store, lanes[0]
    store.close()


def named(*names: int) -> NamedPages:
    return NamedPages(0, [bytes([name]) for name in names], np.array(names, np.int32))


def on_disk(store: TieredStore, *names: int) -> list[bool]:
    store.tend()
    assert store.disk.settle(SECONDS)
    return store.disk.find(0, named(*names).digests).tolist()


def lift(store: TieredStore, *names: int) -> int:
    number = store.lift([(0, named(*names).digests)])
    return store.land(number) if number else 0


def test_a_page_goes_to_the_disk_once_its_copy_is_there(made: Made) -> None:
    pool, store, lanes = made
    store.put(named(1))
    assert on_disk(store, 1) == [False]
    lanes.made[-1].finish()
    assert on_disk(store, 1) == [True]
    store.put(named(2, 3))
    lanes.made[-1].finish()
    assert lift(store, 1) == 1
    store.fetch([named(1)._replace(pages=np.array([7], np.int32))])
    lanes.made[-1].finish()
    assert torch.equal(pool[7], pool[1])


def test_a_page_that_is_put_again_goes_there_behind_its_first_copy(made: Made) -> None:
    """Also where copies in the other direction have come and gone meanwhile."""
    _, store, lanes = made
    store.put(named(2))
    lanes.made[0].finish()
    store.put(named(1))
    store.fetch([named(2)])
    lanes.made[2].finish()
    store.put(named(1))
    assert on_disk(store, 2, 1) == [True, False]
    lanes.made[1].finish()
    assert on_disk(store, 1, 2) == [True, True]


def test_a_slot_that_is_filled_anew_is_not_taken_for_its_first_page(made: Made) -> None:
    _, store, lanes = made
    store.put(named(1, 2))
    store.put(named(3, 4))
    for copy in lanes.made:
        copy.finish()
    assert on_disk(store, 1, 2, 3, 4) == [False, False, True, True]
    assert store.disk.counts.lost == 2


def test_nothing_is_lifted_where_all_slots_are_reserved(made: Made) -> None:
    _, store, lanes = made
    for names in ((1, 2), (3, 4)):
        store.put(named(*names))
        lanes.made[-1].finish()
        assert on_disk(store, *names) == [True, True]
    wanted = named(1, 2).digests
    first = store.lift([(0, wanted)])
    assert first
    assert store.lift([(0, named(3).digests)]) == 0
    assert store.lift([(0, wanted[:1])]) == first
    assert store.counts.used == 0
    assert store.land(first) == 2
    assert store.find(0, wanted).all()
    assert store.are_lifted(0, wanted).all()
    assert lift(store, 3) == 1


def test_a_page_that_came_by_itself_meanwhile_stays(made: Made) -> None:
    _, store, lanes = made
    store.put(named(1))
    lanes.made[-1].finish()
    assert on_disk(store, 1) == [True]
    store.put(named(2, 3))
    lanes.made[-1].finish()
    number = store.lift([(0, named(1).digests)])
    store.put(named(1))
    assert store.land(number) == 0
    assert store.find(0, named(1).digests).all()
    assert not store._shelves[0].reserved
    store.put(named(4, 5))
    assert len(store._shelves[0]) == 2
