"""Copies between a cache's pools and a store's memory, in parallel with forwards, and the waits for them."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array

FORGET = 0.8  # weight of earlier copies in the measured rate, after each new one
MOST_BYTES = 8 << 30  # of a store, copied at once; beyond that the host waits for the oldest copies


class Moves(NamedTuple):
    """Whole pages of one layer group to copy, between pages[i] of its pool and slots[i] of a store's memory; int32 [n]
    each. memory: which of the lanes' memories, see Lanes.extend."""

    group: int
    pages: Int32Array
    slots: Int32Array
    memory: int = 0


class Copy(Protocol):
    """Copies that were queued together. A stage is a run of layers, whose end can be awaited separately."""

    def is_done(self) -> bool: ...

    def wait(self, stage: int | None = None) -> None:
        """Makes the current stream wait for these copies; stage: only for this stage and earlier ones."""
        ...

    def finish(self) -> None:
        """Blocks the host until the copies are done."""
        ...

    @property
    def seconds(self) -> float:
        """The time that they took, once they are done; 0 if unknown."""
        ...


class Lanes(Protocol):
    """Queues of copies, one for each direction. Each runs its copies in order."""

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> Copy:
        """Queues copies, up into the pools or down into the store's memory. They run after everything launched on the
        current stream so far, and after `behind`. last: launches work that follows them on their lane."""
        ...

    def extend(self, memory: Sequence[Tensor]) -> None:
        """Adds another store's memory, uint8 [num_slots, page_bytes] for each layer group. The memory that the lanes
        were made with has number 0, and each later one the next number."""
        ...


class Arrivals:
    """Lets one forward, which computes its layers in order, wait for pages that are copied up layer by layer."""

    def __init__(self, copy: Copy, begins: Sequence[int]) -> None:
        """begins: the first layer of each stage."""
        self._copy, self._begins, self._waited = copy, begins, 0

    def wait(self, layer: int) -> None:
        """Makes the current stream wait for the copies of `layer` and of earlier layers."""
        while self._waited < len(self._begins) and self._begins[self._waited] <= layer:
            self._copy.wait(self._waited)
            self._waited += 1


class PageCopies:
    """The copies under way, by the pages and slots that they read or write. Owned by the thread that owns the pools.

        forward ──writes──► page ──down──► slot          a page's next write waits for its copy down
        forward ◄──reads─── page ◄───up─── slot          a slot's next write waits for its copy up

    Copies are ordered among themselves. A forward waits by wait_for() and arrivals(), a peer by mark().
    """

    def __init__(
        self,
        lanes: Lanes,
        num_pages: Sequence[int] = (),
        num_slots: Sequence[int] = (),
        page_bytes: Sequence[int] = (),
        begins: Sequence[int] = (0,),
    ) -> None:
        """num_pages, num_slots, page_bytes: for each layer group. begins: the first layer of each stage of copies
        up."""
        self._lanes, self._page_bytes, self._begins = lanes, page_bytes, begins
        self._pages = [np.zeros(count, np.int64) for count in num_pages]  # the number of each page's newest copy
        self._up = [np.zeros(count, np.int64) for count in num_pages]  # the same for copies up
        self._slots = [[np.zeros(count, np.int64) for count in num_slots]]  # by memory, then by group
        self._under_way: dict[int, QueuedCopy] = {}  # by number
        self._num_bytes, self._number = [0], 0  # bytes under way, by memory
        self._past_bytes = self._past_seconds = 0.0  # of copies up from memory 0; newer ones weigh more

    @property
    def pending(self) -> bool:
        """Returns whether a copy may be under way."""
        if self._under_way:
            for number in [one for one, queued in self._under_way.items() if queued.copy.is_done()]:
                self._forget(number)
        return bool(self._under_way)

    def num_bytes(self, memory: int) -> int:
        """The bytes that are being copied from and to a memory, see Lanes.extend."""
        return self._num_bytes[memory] if self.pending else 0

    def extend(self, memory: Sequence[Tensor]) -> int:
        """Lets another store copy on the same lanes. memory: see Lanes. Returns the number that its Moves give."""
        self._lanes.extend(memory)
        self._slots.append([np.zeros(len(slots), np.int64) for slots in memory])
        self._num_bytes.append(0)
        return len(self._slots) - 1

    def down(self, moves: Sequence[Moves], last: Callable[[], None] | None = None) -> None:
        """Copies pages to slots. last: see Lanes."""
        self._queue(moves, self._lanes.copy(moves, self._touching(moves), up=False, last=last), up=False)

    def up(self, moves: Sequence[Moves]) -> None:
        """Copies slots to pages, layer by layer."""
        self._queue(moves, self._lanes.copy(moves, self._touching(moves), up=True), up=True)

    def follow(self, group: int, source: Int32Array, target: Int32Array, action: Callable[[], None]) -> None:
        """Launches an action that reads pages `source` and writes pages `target`, int32 [n] both. If the sources are
        still being copied up, the action follows on their lane, and the targets count as being copied up, too."""
        if not self.pending or not self.newest(group, source):
            self.wait_for(group, target)
            action()
            return
        pages = np.concatenate((source, target))
        moves = [Moves(group, pages, pages[:0])]
        self._queue(moves, self._lanes.copy([], self._touching(moves), up=True, last=action), up=True)

    def wait_for(self, group: int, pages: Int32Array) -> None:
        """Makes the current stream wait for all copies that read or write these pages."""
        if self._under_way and pages.size:
            for copy in self._of(self._pages[group], pages):
                copy.wait()

    def newest(self, group: int, pages: Int32Array) -> int:
        """Returns the number of the newest copy up of these pages that is under way; 0 if there is none. It ends after
        earlier copies."""
        number = int(self._up[group][pages].max(initial=0)) if self._under_way else 0
        return number if number in self._under_way else 0

    def arrivals(self, number: int) -> Arrivals | None:
        """Lets a forward wait for copies up to this number; None if they are done."""
        found = self._under_way.get(number)
        return None if found is None else Arrivals(found.copy, self._begins)

    def wait_until(self, number: int) -> None:
        """Makes the current stream wait for the copies up to this number."""
        if number in self._under_way:
            self._under_way[number].copy.wait()

    def filled(self, group: int, slots: Int32Array) -> Int64Array:
        """Returns a copy's number for each slot of memory 0, int64 [n]. Once that copy is done, the slot holds what was
        copied there last."""
        return self._slots[0][group][slots]

    def settle(self, group: int, slots: Int32Array) -> None:
        """Returns once no copy reads or writes these slots of memory 0, int32 [n]."""
        for copy in self._of(self._slots[0][group], slots) if self._under_way else ():
            copy.finish()

    def finish(self) -> None:
        """Returns once no copy is under way, so that pools and memory may end."""
        for queued in list(self._under_way.values()):
            with suppress(RuntimeError):  # the device has failed, and nothing runs on it any more
                queued.copy.finish()

    def is_past(self, number: int) -> bool:
        """Returns whether the copy with this number is done."""
        return number not in self._under_way or self._under_way[number].copy.is_done()

    def mark(self) -> Callable[[], bool] | None:
        """Returns a function that tells whether all copies queued so far are done; None if they already are."""
        if not self.pending:
            return None
        copies = [queued.copy for queued in self._under_way.values()]
        return lambda: all(copy.is_done() for copy in copies)

    @property
    def rate(self) -> float:
        """The bytes a second of recent copies up from memory 0; 0 before the first. Another store's copies have other
        sizes."""
        return self._past_bytes / self._past_seconds if self._past_seconds else 0.0

    def _touching(self, moves: Sequence[Moves]) -> list[Copy]:
        if not self._under_way:
            return []
        found = [self._of(self._pages[of.group], of.pages) for of in moves]
        found += [self._of(self._slots[of.memory][of.group], of.slots) for of in moves]
        return list({id(copy): copy for copies in found for copy in copies}.values())

    def _of(self, numbers: np.ndarray, places: Int32Array) -> list[Copy]:
        """Returns the copies under way that read or write these pages or slots. numbers: of the newest copy of each."""
        found = np.unique(numbers[places]).tolist()
        return [self._under_way[number].copy for number in found if number in self._under_way]

    def _queue(self, moves: Sequence[Moves], copy: Copy, *, up: bool) -> None:
        self._number += 1
        for group, pages, slots, memory in moves:
            self._pages[group][pages] = self._slots[memory][group][slots] = self._number
            if up:
                self._up[group][pages] = self._number
        num_bytes = sum(of.slots.size * self._page_bytes[of.group] for of in moves)
        own = moves[0].memory if moves else 0
        self._under_way[self._number] = QueuedCopy(copy, num_bytes, up, own)
        self._num_bytes[own] += num_bytes
        if copy.is_done():
            self._forget(self._number)
        while self._num_bytes[own] > MOST_BYTES and len(self._under_way) > 1:
            oldest = next(iter(self._under_way))
            self._under_way[oldest].copy.finish()
            self._forget(oldest)

    def _forget(self, number: int) -> None:
        copy, num_bytes, up, memory = self._under_way.pop(number)
        self._num_bytes[memory] -= num_bytes
        if up and memory == 0 and num_bytes and copy.seconds:
            self._past_bytes = FORGET * self._past_bytes + num_bytes
            self._past_seconds = FORGET * self._past_seconds + copy.seconds


class QueuedCopy(NamedTuple):
    copy: Copy
    num_bytes: int
    up: bool
    memory: int


class MadeCopy(NamedTuple):
    """A Copy that is already done."""

    seconds: float

    def is_done(self) -> bool:
        return True

    def wait(self, stage: int | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectLanes:
    """Copies synchronously, on a CPU."""

    def __init__(self, pools: Sequence[Tensor] = (), memory: Sequence[Tensor] = ()) -> None:
        """pools, memory: each layer group's pool [num_pages, n] and part of the store's memory [num_slots, n], in types
        of the same size."""
        self._pools, self._memories = pools, list[Sequence[Tensor]]()
        self.extend(memory)

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> MadeCopy:
        began = time.perf_counter()
        for group, pages, slots, number in moves:
            pool, memory = self._pools[group], self._memories[number][group]
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                if up:
                    pool[page].copy_(memory[slot])
                else:
                    memory[slot].copy_(pool[page])
        seconds = time.perf_counter() - began
        if last is not None:
            last()
        return MadeCopy(seconds)

    def extend(self, memory: Sequence[Tensor]) -> None:
        self._memories.append([of.view(pool.dtype) for of, pool in zip(memory, self._pools, strict=True)])


NO_COPIES = PageCopies(DirectLanes())
"""The copies of a cache without a store."""
