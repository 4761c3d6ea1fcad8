"""Pages that are kept in host memory, against a dictionary of lists that forgets its oldest."""

from collections import OrderedDict
from random import Random

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages

SHAPES = ((9, 3, 1, 2), (12, 7))  # the pages of the second are no whole number of words
SLOTS = (4, 3)


def pools_of() -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(SHAPES, (torch.float32, torch.int8), strict=True)]


def named(group: int, names: list[int], pages: list[int]) -> NamedPages:
    return NamedPages(group, [bytes([name]) for name in names], np.array(pages, np.int32))


class Naive:
    """By group and name the numbers of a page; the first was used longest ago."""

    def __init__(self) -> None:
        self.groups = [OrderedDict[int, list[float]]() for _ in SLOTS]
        self.held = list[int]()
        self.down = self.up = self.hits = 0

    def hold(self, group: int, names: list[int]) -> None:
        self.held = [name for name in names if name in self.groups[group]]
        for name in self.held[::-1]:
            self.groups[group].move_to_end(name)

    def put(self, group: int, name: int, content: list[float]) -> None:
        known = self.groups[group]
        if name not in known and len(known) == SLOTS[group]:
            oldest = next(iter(known))
            if oldest in self.held:
                return
            del known[oldest]
        self.down += name not in known
        known.setdefault(name, content)
        known.move_to_end(name)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_program_finds_what_a_dictionary_finds(seed: int, verify: bool) -> None:
    random, pools, naive = Random(seed), pools_of(), Naive()
    store = HostStore(pools, SLOTS, verify=verify)
    for _ in range(300):
        group = random.randrange(2)
        pages, names = random.sample(range(9), 3), random.sample(range(8), 3)
        if random.random() < 0.5:
            for page, name in zip(pages, names, strict=True):
                content = torch.randint(-9, 9, SHAPES[group][1:], generator=torch.Generator().manual_seed(name))
                pools[group][page] = content
                naive.put(group, name, content.flatten().tolist())
            store.put(named(group, names, pages))
            store.settle()
            pools[group].fill_(0)
            continue
        has = [name in naive.groups[group] for name in names]
        assert store.find(group, [bytes([name]) for name in names]).tolist() == has
        if random.random() < 0.5:
            others = random.sample(range(8, 12), 3)
            with store.held([(group, [bytes([name]) for name in names])]):
                naive.hold(group, names)
                store.put(named(group, others, pages))
                for name in others:
                    naive.put(group, name, [0.0] * pools[group][0].numel())
                naive.hold(group, [])
            (found,) = store.fetch([named(group, names, pages)])
            assert found.tolist() == has
            for page, name, there in zip(pages, names, has, strict=True):
                assert not there or pools[group][page].flatten().tolist() == naive.groups[group][name]
            naive.up, naive.hits = naive.up + sum(has), naive.hits + any(has)
    sizes = [pool[0].numel() * pool.element_size() for pool in pools]
    used = sum(len(known) * size for known, size in zip(naive.groups, sizes, strict=True))
    counts = store.counts
    assert counts[1:] == (used, naive.down, naive.up, naive.hits, 0)
    assert used <= counts.capacity


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
    store.memory[:4] += 1  # of the first page
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
    words = store.memory[:16].view(torch.int64)
    words[:] = words.flip(0)
    assert not store.fetch([wanted])[0].any()


def test_a_peer_waits_for_pages_that_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was fetched, evicted and given to a peer is written by a copy that is still queued."""
    seen = list[str]()

    class Event:
        def record(self, stream: object) -> None:
            seen.append("queued")

        def synchronize(self) -> None:
            seen.append("done")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    store = HostStore(pools_of(), SLOTS)
    store._device = torch.device("cuda")
    store.put(named(0, [1], [0]))
    store.settle()
    store.settle()
    assert seen == ["queued", "done"]
    store.fetch([named(0, [2], [1])])
    store.settle()
    assert seen == ["queued", "done"]
    store.fetch([named(0, [1], [1])])
    store.put(named(0, [1], [1]))
    store.settle()
    assert seen == ["queued", "done"] * 2


def test_more_memory_than_there_is_is_refused_at_once() -> None:
    """Nothing grows with the number of slots before."""
    with pytest.raises(MemoryError, match=r"^cache\.host_bytes: this host has no \d+ bytes left"):
        HostStore(pools_of(), (1 << 45, 3))


def test_a_shelf_without_slots_keeps_nothing() -> None:
    store = HostStore(pools_of(), (0, 3))
    store.put(named(0, [1, 2], [0, 1]))
    assert not store.find(0, [b"\1", b"\2"]).any()
    assert store.counts.pages_down == 0
    with pytest.raises(InvalidArgument, match=r"num_slots is \(1, -1\); 2 counts of at least 0 are accepted"):
        HostStore(pools_of(), (1, -1))
