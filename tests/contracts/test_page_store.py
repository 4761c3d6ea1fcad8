"""Compares stores of evicted pages, in host memory alone and with a disk, with dictionaries that forget their
oldest."""

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tandem.cache.store.disk.disk_pages import DiskSpace
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages, PageStore
from tandem.cache.store.tiered_store import TieredStore

SHAPES = ((9, 3, 1, 2), (12, 7))  # the pages of the second are no whole number of words
SLOTS = (4, 3)
NAMES = 12
SETTLE_SECONDS = 30.0
FINGERPRINT = bytes(range(16))


def pools_of() -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, (torch.float32, torch.int8), strict=True)]


def digests(names: list[int]) -> list[bytes]:
    return [bytes([name]) for name in names]


def content(group: int, name: int) -> torch.Tensor:
    return torch.randint(-9, 9, SHAPES[group][1:], generator=torch.Generator().manual_seed(name))


class Naive:
    """A naive store: the numbers of a page by group and name; the first was used longest ago. disk: all that ever
    came."""

    def __init__(self) -> None:
        self.groups = [OrderedDict[int, list[float]]() for _ in SLOTS]
        self.disk = [dict[int, list[float]]() for _ in SLOTS]
        self.held = list[int]()
        self.down = self.up = self.hits = 0

    def hold(self, group: int, names: list[int]) -> None:
        self.held = [name for name in names if name in self.groups[group]]
        for name in self.held[::-1]:
            self.groups[group].move_to_end(name)

    def put(self, group: int, name: int, numbers: list[float]) -> None:
        known = self.groups[group]
        if name not in known and len(known) == SLOTS[group]:
            oldest = next(iter(known))
            if oldest in self.held:
                return
            del known[oldest]
        self.down += name not in known
        known.setdefault(name, numbers)
        known.move_to_end(name)
        self.disk[group].setdefault(name, numbers)

    def lift(self, group: int, names: list[int]) -> None:
        known = self.groups[group]
        self.hold(group, names)
        fresh = [name for name in names if name not in known and name in self.disk[group]]
        if len(fresh) <= SLOTS[group] - len(self.held):
            for _ in range(max(len(known) + len(fresh) - SLOTS[group], 0)):
                known.popitem(last=False)
            known |= {name: self.disk[group][name] for name in fresh}
        self.held = []


@pytest.fixture(params=["host", "host, compared", "disk", "disk, compared"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[torch.Tensor], PageStore]]:
    pools, verify = pools_of(), "compared" in request.param
    store: PageStore = HostStore(pools, SLOTS, verify=verify)
    if request.param.startswith("disk"):
        store = TieredStore(pools, SLOTS, DiskSpace(tmp_path, (1 << 20, 1 << 20), FINGERPRINT), verify=verify)
    yield pools, store
    store.close()


def settle(store: PageStore) -> None:
    store.tend()
    if isinstance(store, TieredStore):
        assert store.disk.settle(SETTLE_SECONDS)


def bring(store: PageStore, group: int, names: list[int]) -> None:
    """Brings up the pages of these names that are on the disk."""
    below = store.find_below(group, digests(names)) | store.find(group, digests(names))
    wanted = [name for name, there in zip(names, below.tolist(), strict=True) if there]
    number = store.lift([(group, digests(wanted))])
    if number:
        store.land(number)


@pytest.mark.parametrize("seed", range(3))
def test_any_program_finds_what_a_dictionary_finds(made: tuple[list[torch.Tensor], PageStore], seed: int) -> None:
    (pools, store), random, naive = made, Random(seed), Naive()
    for _ in range(200):
        group = random.randrange(2)
        pages, names = random.sample(range(9), 3), random.sample(range(8), 3)
        if random.random() < 0.5:
            for page, name in zip(pages, names, strict=True):
                pools[group][page] = content(group, name)
                naive.put(group, name, content(group, name).flatten().tolist())
            store.put(NamedPages(group, digests(names), np.array(pages, np.int32)))
            pools[group].fill_(0)
            settle(store)
            continue
        if store.disk_counts is not None and random.random() < 0.7:
            bring(store, group, names)
            naive.lift(group, names)
        has = [name in naive.groups[group] for name in names]
        assert store.find(group, digests(names)).tolist() == has
        if random.random() < 0.5:
            others = random.sample(range(8, NAMES), 3)
            with store.held([(group, digests(names))]):
                naive.hold(group, names)
                for page, name in zip(pages, others, strict=True):
                    pools[group][page] = content(group, name)
                    naive.put(group, name, content(group, name).flatten().tolist())
                store.put(NamedPages(group, digests(others), np.array(pages, np.int32)))
                naive.hold(group, [])
            settle(store)
            (found,) = store.fetch([NamedPages(group, digests(names), np.array(pages, np.int32))])
            assert found.tolist() == has
            for page, name, there in zip(pages, names, has, strict=True):
                assert not there or pools[group][page].flatten().tolist() == naive.groups[group][name]
            naive.up, naive.hits = naive.up + sum(has), naive.hits + any(has)
    sizes = [pool[0].numel() * pool.element_size() for pool in pools]
    used = sum(len(known) * size for known, size in zip(naive.groups, sizes, strict=True))
    assert store.counts[1:] == (used, naive.down, naive.up, naive.hits, 0)
    assert used <= store.counts.capacity
    if (disk := store.disk_counts) is not None:
        assert (disk.bad, disk.failed) == (0, 0)
        assert disk.written == sum(map(len, naive.disk))
        assert disk.used == sum(len(known) * size for known, size in zip(naive.disk, sizes, strict=True))
        assert disk.read > 0


def test_pages_that_are_held_stay(made: tuple[list[torch.Tensor], PageStore]) -> None:
    pools, store = made
    pools[0][:4] = 1.0
    names = digests([0, 1, 2, 3])
    store.put(NamedPages(0, names, np.arange(4, dtype=np.int32)))
    with store.held([(0, names)]):
        store.put(NamedPages(0, digests([9]), np.array([5], np.int32)))
    assert store.find(0, names).all()
    store.put(NamedPages(0, digests([9]), np.array([5], np.int32)))
    assert not store.find(0, names).all()
    assert store.take_forgotten()
