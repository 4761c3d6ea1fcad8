"""Sequences go to host memory and come back as they were, while others use their pages. Copies are as late as
they may be."""

from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument, OutOfPages, OutOfSequences
from tandem.cache.store.parked_store import ParkedStore
from tests.cache.kinds.test_state_snapshots import Program as StateProgram
from tests.cache.kinds.test_state_snapshots import forward as state_forward
from tests.cache.kinds.test_state_snapshots import island_of
from tests.cache.known import Known
from tests.cache.late_lanes import LateLanes
from tests.cache.naive import pools_of
from tests.cache.oracle import Oracle, Setting, cache_of
from tests.cache.peer_writer import PeerWriter
from tests.cache.program import MOST_SEQUENCES, QUERY_HEADS, Program
from tests.cache.settings import PLAIN, SETTINGS
from tests.support.tvm_cache import TvmCache

SLOTS = 40


def keep_parked(cache: TvmCache, slots: int = SLOTS, seed: int = 0) -> ParkedStore:
    """seed: of the copies that are made early."""
    pools = [group.site.pool for group in cache._groups]
    copies = cache._pools.copies if cache.has_copies else None
    store = ParkedStore(pools, [slots] * len(pools), copies, partial(LateLanes, random=Random(seed)))
    cache.keep_parked(store)
    return store


def spoil_free_pages(cache: TvmCache) -> None:
    """Fills pages that nobody uses with garbage, once copies are past. Sequences that come back do not look there."""
    for number, (group, users) in enumerate(zip(cache._groups, cache._pools.users, strict=True)):
        free = np.flatnonzero((users.allocator.references == 0) & (users.allocator._writers == 0))
        cache._pools.copies.wait_for(number, free.astype(np.int32))
        words = group.site.pool.view(torch.uint8).view(group.site.pool.shape[0], -1)
        words[free] = 0x55


class ParkingProgram(Program):
    """Parks and resumes sequences in between."""

    def __init__(self, seed: int, setting: Setting, oracle: Oracle) -> None:
        super().__init__(seed, setting, oracle)
        self._operations |= {self.park: 3.0, self.resume: 3.0}
        self.parked: list[dict[int, Known]] = [{}, {}]
        self.stores = [keep_parked(side.cache, self.random.choice([6, SLOTS]), seed) for side in self.sides]

    def park(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(list(side.known))
        if sequence is None:
            return
        known, cache = side.known[sequence], side.cache
        sends = {transfer.source for transfer in self.sides[1 - pe].incoming.values()}
        able = sequence in side.resting() and known.stream is None and sequence not in sends
        if not cache.can_park(sequence):
            with pytest.raises(InvalidArgument, match=r"only others are parked|has no room for them"):
                cache.park(sequence)
            self.count("full" if able else "not parked")
            return
        if sequence in sends:
            return  # the program counts what it has sent
        cache.park(sequence)
        assert sequence in self.stores[pe]
        cache.remove_sequence(sequence)
        self.parked[pe][sequence] = side.known.pop(sequence)
        if self.random.random() < 0.5:  # else whoever gets a page has to wait
            spoil_free_pages(cache)
        self.count("parked")

    def resume(self, pe: int) -> None:
        side, cache, sequence = self.sides[pe], self.sides[pe].cache, self.pick(list(self.parked[pe]))
        if sequence is None or len(side.known) == MOST_SEQUENCES:
            return
        known = self.parked[pe][sequence]
        if self.random.random() < 0.2:
            cache.drop_parked(sequence)
            del self.parked[pe][sequence]
            return
        tokens, longest = known.length + self.random.choice([0, 0, 9]), 9
        fits = cache.room(tokens, longest).fits
        try:
            cache.resume(sequence, tokens, longest)
        except OutOfPages:
            assert not fits
            self.count("no room")
            return
        side.known[sequence] = self.parked[pe].pop(sequence)
        side.known[sequence].reserved = tokens, longest
        side.known[sequence].sends = None
        self.count("resumed")

    def end(self) -> None:
        for side, parked, store in zip(self.sides, self.parked, self.stores, strict=True):
            counts = side.cache.pages
            assert (counts.parked, counts.parked_bytes_used) == store.counts[:2]
            assert counts.parked == len(parked)
            for sequence in list(parked):
                side.cache.drop_parked(sequence)
            assert store.counts[:2] == (0, 0)
            assert store.fits([len(shelf) for shelf in store.memory.shelves])
        super().end()


@pytest.mark.gate("two groups", "compressed, windows")
@pytest.mark.parametrize("name", SETTINGS)
def test_random_programs_with_parked_sequences(name: str) -> None:
    setting, counts = SETTINGS[name], Counter[str]()
    oracle = Oracle(setting, QUERY_HEADS)
    for seed in range(2):
        program = ParkingProgram(seed, setting, oracle)
        try:
            program.run(300)
        except BaseException as error:
            error.add_note(f"seed {seed} of setting {name!r}")
            raise
        counts.update(program.counts)
    assert counts.keys() >= {"parked", "resumed", "not parked"}


class ParkingStates(StateProgram):
    """A sequence is parked and comes back at once, in another page, or later."""

    def park(self, at: int) -> None:
        cache, held = self.island.caches[at], self.held[at]
        one = self.random.choice(held)
        assert cache.can_park(one)
        cache.park(one)
        cache.remove_sequence(one)
        spoil_free_pages(cache)
        if self.random.random() < 0.5:
            others = {other: 3 for other in held if other != one and cache.num_tokens(other) < 50}
            if others:
                state_forward(cache, self.tokens, others)
        cache.resume(one, 60, 20)
        self.done["parked"] += 1

    def publish(self, at: int) -> None:
        super().publish(at)
        self.park(at)


@pytest.mark.gate("0")
@pytest.mark.parametrize("seed", range(3))
def test_states_come_back(seed: int) -> None:
    program = ParkingStates(Random(seed), island_of(20, 10))
    for cache in program.island.caches:
        keep_parked(cache, seed=seed)
    program.run(120)
    assert program.done["parked"] > 10


def setting_cache(num_pages: int = 12) -> tuple[TvmCache, ParkedStore]:
    pools = pools_of(PLAIN, num_pages)
    cache = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    return cache, keep_parked(cache, 8)


def test_a_sequence_without_room_stays_parked() -> None:
    cache, store = setting_cache()
    cache.add_sequence(1)
    cache.reserve(1, 32)
    cache.park(1)
    cache.remove_sequence(1)
    cache.add_sequence(2)
    cache.reserve(2, 40)
    before = cache.pages
    with pytest.raises(OutOfPages):
        cache.resume(1, 32)
    assert (cache.pages, 1 in store, len(cache._table)) == (before, True, 1)
    cache.add_sequence(3)
    with pytest.raises(OutOfSequences):
        cache.resume(1, 0)
    cache.remove_sequence(2)
    cache.resume(1, 32)
    assert 1 not in store
    cache.drop_parked(1)


def test_what_is_not_parked_is_named() -> None:
    cache, _ = setting_cache()
    with pytest.raises(InvalidArgument, match=r"sequence 5 is not parked; park\(\) comes first"):
        cache.resume(5, 8)
    cache.add_sequence(1)
    cache.prepare_receive(1, 6)
    assert not cache.can_park(1)
    with pytest.raises(InvalidArgument, match="sequence 1 is being received; only others are parked"):
        cache.park(1)
    pools = pools_of(PLAIN, 4)
    plain = cache_of(SETTINGS["two groups"], pools, PeerWriter(0, [pools]), 2)
    plain.add_sequence(1)
    assert not plain.can_park(1)
    with pytest.raises(InvalidArgument, match=r"no store for parked sequences; keep_parked\(\) gives it one"):
        plain.park(1)
    with pytest.raises(InvalidArgument, match=r"num_slots is \(1,\); it must be 2 counts of at least 0"):
        ParkedStore(pools_of(PLAIN, 4), (1,))
