"""Random programs over the adapters of a worker: each sequence finds its own in its slot, and nothing is left."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.workers.adapters.adapters import NO_ADAPTER, Adapters, OutOfSlots
from tandem.workers.adapters.peft_folder import Found
from tandem.workers.errors import AdapterNotHeld, NoRoom
from tandem.workers.weights.adapted import AdaptedWeights, AdapterRows

SLOTS, PLACES, NAMES = 3, 5, 8


class Program:
    """naive: what each sequence uses, and what is parked; adapters hold their number in every place of memory."""

    def __init__(self, seed: int) -> None:
        weights = AdaptedWeights({}, torch.zeros(SLOTS, 4), 1, AdapterRows(), ())
        self.memory = weights.memory
        self.adapters = Adapters(SimpleNamespace(), weights, PLACES * weights.slot_bytes)  # type: ignore[arg-type]
        self.adapters._reader = SimpleNamespace(read=self._read)  # type: ignore[assignment]
        self.random = Random(seed)
        self.held: set[int] = set()  # that new sequences may use
        self.awake: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        self.number = 0

    @staticmethod
    def _read(folder: Path, numbers: Tensor) -> Found:
        numbers.fill_(int(folder.name) + 1)
        return Found(digest_of(int(folder.name)), 1)

    @property
    def alive(self) -> set[int]:
        return self.held | {*self.awake.values(), *self.parked.values()}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            getattr(
                self, self.random.choice(("load", "remove", "take", "take", "release", "park", "resume", "forget"))
            )()
            self.check()
        for sequence in [*self.awake]:
            self.adapters.release(sequence)
        for sequence in [*self.parked]:
            self.adapters.forget(sequence)
        for one in [*self.held]:
            self.adapters.remove(digest_of(one))
        assert not self.adapters.held
        assert sorted(self.adapters._places) == [*range(PLACES)]
        assert sorted(self.adapters._unused) == [*range(SLOTS)]

    def load(self) -> None:
        one, self.number = self.random.randrange(NAMES), self.number + 1
        if len(self.alive) == PLACES:
            with pytest.raises(NoRoom):
                self.adapters.read(self.number, "x", str(one))
            return
        self.adapters.read(self.number, "x", str(one))
        if self.random.random() < 0.2:
            self.adapters.drop(self.number)
        else:
            self.adapters.load(self.number, digest_of(one))
            self.held.add(one)

    def remove(self) -> None:
        one = self.random.randrange(NAMES)
        self.adapters.remove(digest_of(one))
        self.held.discard(one)

    def take(self) -> None:
        one, self.number = self.random.randrange(NAMES), self.number + 1
        if one not in self.held:
            with pytest.raises(AdapterNotHeld):
                self.adapters.take(self.number, digest_of(one))
            return
        fits = one in self.awake.values() or len({*self.awake.values()}) < SLOTS
        assert self.adapters.fits(digest_of(one)) == fits
        if fits:
            self.adapters.take(self.number, digest_of(one))
            self.awake[self.number] = one
        else:
            with pytest.raises(OutOfSlots):
                self.adapters.take(self.number, digest_of(one))

    def release(self) -> None:
        if self.awake:
            sequence = self.random.choice([*self.awake])
            self.adapters.release(sequence)
            del self.awake[sequence]

    def park(self) -> None:
        if self.awake:
            sequence = self.random.choice([*self.awake])
            self.adapters.park(sequence)
            self.adapters.release(sequence)
            self.parked[sequence] = self.awake.pop(sequence)

    def resume(self) -> None:
        if not self.parked:
            return
        sequence = self.random.choice([*self.parked])
        one = self.parked[sequence]
        if one not in self.awake.values() and len({*self.awake.values()}) == SLOTS:
            with pytest.raises(OutOfSlots):
                self.adapters.resume(sequence)
            return
        self.adapters.resume(sequence)
        if self.random.random() < 0.3:  # the cache had no room
            self.adapters.stay_parked(sequence)
        else:
            self.awake[sequence] = self.parked.pop(sequence)

    def forget(self) -> None:
        if self.parked:
            sequence = self.random.choice([*self.parked])
            self.adapters.forget(sequence)
            del self.parked[sequence]

    def check(self) -> None:
        ids = [*self.awake, -5]
        slots: Any = self.adapters.slots_of(ids, np.full(len(ids), 2))
        if not self.awake:
            assert slots is None
        else:
            assert slots.tolist()[-2:] == [NO_ADAPTER] * 2
            wanted = [one + 1 for one in self.awake.values() for _ in range(2)]
            assert self.memory[torch.from_numpy(slots[:-2])][:, 0].tolist() == wanted
        found = {one.digest: one for one in self.adapters.held}
        assert {*found} == {digest_of(one) for one in self.alive}
        for one in self.alive:
            users = [*self.awake.values(), *self.parked.values()].count(one)
            assert (found[digest_of(one)].sequences, found[digest_of(one)].removed) == (users, one not in self.held)


def digest_of(one: int) -> bytes:
    return one.to_bytes(16, "little")


@pytest.mark.parametrize("seed", range(4))
def test_each_sequence_finds_its_adapter(seed: int) -> None:
    Program(seed).run(400)
