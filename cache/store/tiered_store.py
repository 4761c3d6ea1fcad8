"""A page store in host memory that is backed by a local disk."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.store.disk.disk_pages import DiskCounts, DiskPages, DiskSpace, Reading
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages, PageNames


@dataclass(frozen=True)
class _Filled:
    """A slot that a copy fills, and how often it has been filled then. copy: the number of its last copy, which comes
    behind that one."""

    group: int
    digest: bytes
    slot: int
    times: int
    copy: int


class TieredStore(HostStore):
    """Pages go to the disk soon after they have come to host memory. So the disk has them when host memory needs the
    slot, or when the process ends. They come back into host memory by lift() and land().

        pages ──put──► host memory ──tend──► disk       a slot that is filled anew before it is written is lost
        pages ◄─fetch─ host memory ◄─lift, land─ disk   a slot is reserved while the disk fills it

    What host memory holds follows from the calls alone, also here.
    """

    def __init__(self, pools: Sequence[Tensor], num_slots: Sequence[int], space: DiskSpace, **options: Any) -> None:
        """options: those of HostStore. Raises InvalidArgument, see DiskPages."""
        super().__init__(pools, num_slots, **options)
        self.disk = DiskPages(self.page_bytes, space)
        self._filling: deque[_Filled] = deque()
        self._rows = [shelf.numpy() for shelf in self._memory.shelves]
        self._lifting: dict[int, list[Reading]] = {}  # by number
        self._number = 0
        self._lifted: list[set[bytes]] = [set() for _ in num_slots]

    def has(self, digest: bytes) -> bool:
        return super().has(digest) or self.disk.has(digest)

    def digests(self) -> list[bytes]:
        return [*super().digests(), *self.disk.digests()]

    def take_forgotten(self) -> list[bytes]:
        forgotten = super().take_forgotten()
        for lifted in self._lifted:
            lifted.difference_update(forgotten)
        return forgotten + self.disk.take_removed()

    def put(self, evicted: NamedPages) -> None:
        shelf = self._shelves[evicted.group]
        known = [digest for digest in evicted.digests if digest in shelf]
        self._came(evicted.group, dict(zip(shelf.slots(known), known, strict=True)))  # the disk may have forgotten it
        super().put(evicted)

    def fetch(self, wanted: Sequence[NamedPages]) -> list[NDArray[np.bool_]]:
        found = super().fetch(wanted)
        for group, digests, _ in wanted:
            self._lifted[group].difference_update(digests)
        return found

    @property
    def has_disk(self) -> bool:
        return True

    def find_below(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        return self.disk.find(group, digests)

    def are_lifted(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.array([digest in self._lifted[group] for digest in digests], np.bool_)

    def lift(self, wanted: Sequence[PageNames]) -> int:
        fresh = list[tuple[int, list[bytes]]]()
        for group, digests in wanted:
            shelf = self._shelves[group]
            shelf.hold(digests)
            fresh.append((group, [one for one in digests if one not in shelf and one not in shelf.reserved]))
        readings = self._reserved([of for of in fresh if of[1]])
        for group, _ in wanted:
            self._shelves[group].hold(())
        if readings is None:
            return 0
        if readings:
            self._number += 1
            self._lifting[self._number] = readings
            self.disk.read(readings)
        comes = any(one in self._shelves[group].reserved for group, digests in wanted for one in digests)
        return self._number if comes else 0

    def is_lifted(self, number: int) -> bool:
        return all(reading.done.is_set() for reading in self._lifting.get(number, ()))

    def land(self, number: int) -> int:
        readings = self._lifting.pop(number)
        for reading in readings:
            reading.done.wait()
        bad = [not there for reading in readings for there in reading.found.tolist()]
        all_good = not self._agree(sum(bad))
        come = 0
        for reading in readings:
            for index, digest in enumerate(reading.digests):
                is_good = all_good or not self._agree(int(not reading.found[index]))
                slot = self._shelves[reading.group].place(digest, is_good=is_good)
                if slot is not None:
                    come += 1
                    self._lifted[reading.group].add(digest)
                    if self._sums is not None:
                        self._sums[reading.group].set(slot, int(reading.results[index]))
        return come

    def tend(self) -> list[bytes]:
        while self._filling and self.copies.is_past(self._filling[0].copy):
            of = self._filling.popleft()
            is_there = partial(self._is_there, of)
            self.disk.put(of.group, of.digest, self._rows[of.group][of.slot], is_there)
        return self.disk.take_adopted()

    @property
    def disk_rate(self) -> float:
        return self.disk.rate

    @property
    def disk_counts(self) -> DiskCounts | None:
        return self.disk.counts

    def close(self) -> None:
        self.disk.close()

    def _came(self, group: int, names: dict[int, bytes]) -> None:
        slots = np.fromiter(names, np.int32, len(names))
        times, copies = self._filled[group][slots].tolist(), self.copies.filled(group, slots).tolist()
        of_slots = zip(names.items(), times, copies, strict=True)
        self._filling += [_Filled(group, digest, slot, *rest) for (slot, digest), *rest in of_slots]

    def _is_there(self, of: _Filled) -> bool:
        """Returns whether the slot has not been filled anew. Runs on the disk's thread."""
        return int(self._filled[of.group][of.slot]) == of.times

    def _reserved(self, wanted: Sequence[tuple[int, list[bytes]]]) -> list[Reading] | None:
        """Reserves slots. Returns what to read into them, or None if some group has too few."""
        taken, readings = list[tuple[int, list[bytes]]](), []
        for group, digests in wanted:
            slots = self._shelves[group].reserve(digests)
            if slots is None:
                for other, names in taken:
                    for digest in names:
                        self._shelves[other].place(digest, is_good=False)
                return None
            taken.append((group, digests))
            places = np.array(slots, np.int32)
            self.copies.settle(group, places)
            self._filled[group][places] += 1
            also = None if self._sums is None else self._sums[group].of_host
            readings.append(Reading(group, digests, [self._rows[group][slot] for slot in slots], also))
        return readings
