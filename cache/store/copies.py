"""Copies between a cache's pools and a store's memory, beside the forwards, and who waits for them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array

FORGET = 0.8  # what earlier copies count beside the newest
MOST_BYTES = 8 << 30  # under way at once; then the host waits for the oldest copies


class Moves(NamedTuple):
    """Whole pages of one layer group that are copied: between pages[i] of its pool and slots[i] of the store's memory;
    int32 [n] each."""

    group: int
    pages: Int32Array
    slots: Int32Array


class Copy(Protocol):
    """Copies that were queued together. A stage is a run of layers; each has its own end."""

    def is_done(self) -> bool: ...

    def wait(self, stage: int | None = None) -> None:
        """What is launched on the current stream from now on runs after these copies; stage: after those of this stage
        and of earlier ones."""
        ...

    def finish(self) -> None:
        """Blocks the host until they are done."""
        ...

    @property
    def seconds(self) -> float:
        """How long they took, once they are done; 0: nobody knows."""
        ...


class Lanes(Protocol):
    """Where copies are queued. There is one lane for each direction, which makes its copies in order."""

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> Copy:
        """Queues copies: up into the pools, else into the store's memory. They run after what was launched on the
        current stream so far, and after `behind`. last: launches what is to follow them on their lane."""
        ...


class Arrivals:
    """The layers of pages that come up, for one forward, which computes its layers in order."""

    def __init__(self, copy: Copy, begins: Sequence[int]) -> None:
        """begins: the first layer of each stage."""
        self._copy, self._begins, self._waited = copy, begins, 0

    def wait(self, layer: int) -> None:
        """What is launched from now on runs after the copies of `layer`, and of those before it."""
        while self._waited < len(self._begins) and self._begins[self._waited] <= layer:
            self._copy.wait(self._waited)
            self._waited += 1


class PageCopies:
    """Copies under way, by the pages and slots that they read or write. Owned by the thread that owns the pools.

        forward ──writes──► page ──down──► slot          a page's next write waits for its copy down
        forward ◄──reads─── page ◄───up─── slot          a slot's next write waits for its copy up

    Copies wait for each other by themselves. A forward waits by wait_for() and arrivals(), a peer by mark().
    """

    def __init__(
        self,
        lanes: Lanes,
        num_pages: Sequence[int] = (),
        num_slots: Sequence[int] = (),
        page_bytes: Sequence[int] = (),
        begins: Sequence[int] = (0,),
    ) -> None:
        """num_pages, num_slots, page_bytes: of each layer group. begins: the first layer of each stage of copies up."""
        self._lanes, self._page_bytes, self._begins = lanes, page_bytes, begins
        self._pages = [np.zeros(count, np.int64) for count in num_pages]  # of each the number of its newest copy
        self._up = [np.zeros(count, np.int64) for count in num_pages]  # of each that of its newest copy up
        self._slots = [np.zeros(count, np.int64) for count in num_slots]
        self._under_way: dict[int, QueuedCopy] = {}  # by number
        self._num_bytes = self._number = 0
        self._past_bytes = self._past_seconds = 0.0  # of copies up, later ones more than earlier ones

    @property
    def pending(self) -> bool:
        """Whether a copy may be under way."""
        if self._under_way:
            for number in [one for one, queued in self._under_way.items() if queued.copy.is_done()]:
                self._forget(number)
        return bool(self._under_way)

    def down(self, moves: Moves, last: Callable[[], None] | None = None) -> None:
        """Pages to slots. last: see Lanes."""
        self._queue([moves], self._lanes.copy([moves], self._touching([moves]), up=False, last=last), up=False)

    def up(self, moves: Sequence[Moves]) -> None:
        """Slots to pages, layer by layer."""
        self._queue(moves, self._lanes.copy(moves, self._touching(moves), up=True), up=True)

    def follow(self, group: int, source: Int32Array, target: Int32Array, action: Callable[[], None]) -> None:
        """Launches an action that reads pages `source` and writes pages `target`, int32 [n] both. Where these are on
        their way up, it follows them on their lane, and the targets count as on their way, too."""
        if not self.pending or not self.newest(group, source):
            self.wait_for(group, target)
            action()
            return
        pages = np.concatenate((source, target))
        moves = [Moves(group, pages, pages[:0])]
        self._queue(moves, self._lanes.copy([], self._touching(moves), up=True, last=action), up=True)

    def wait_for(self, group: int, pages: Int32Array) -> None:
        """What is launched on the current stream from now on runs after all copies that read or write these pages."""
        if self._under_way and pages.size:
            for copy in self._of(self._pages[group], pages):
                copy.wait()

    def newest(self, group: int, pages: Int32Array) -> int:
        """The number of the newest copy up under way of these pages, which comes behind earlier ones; 0: there is
        none."""
        number = int(self._up[group][pages].max(initial=0)) if self._under_way else 0
        return number if number in self._under_way else 0

    def arrivals(self, number: int) -> Arrivals | None:
        """Of copies up until that number, for a forward that reads the pages; None where all are there."""
        found = self._under_way.get(number)
        return None if found is None else Arrivals(found.copy, self._begins)

    def wait_until(self, number: int) -> None:
        """What is launched on the current stream from now on runs after the copies up until that number."""
        if number in self._under_way:
            self._under_way[number].copy.wait()

    @property
    def last(self) -> int:
        """The number of the copies that were queued last."""
        return self._number

    def settle(self, group: int, slots: Int32Array) -> None:
        """Returns once no copy reads or writes these slots, int32 [n]."""
        for copy in self._of(self._slots[group], slots) if self._under_way else ():
            copy.finish()

    def is_past(self, number: int) -> bool:
        """Whether the copies of that number are done."""
        return number not in self._under_way or self._under_way[number].copy.is_done()

    def mark(self) -> Callable[[], bool] | None:
        """Says whether all copies that are queued by now are done; None where they are."""
        if not self.pending:
            return None
        copies = [queued.copy for queued in self._under_way.values()]
        return lambda: all(copy.is_done() for copy in copies)

    @property
    def rate(self) -> float:
        """Bytes a second that copies up have moved lately; 0 before the first."""
        return self._past_bytes / self._past_seconds if self._past_seconds else 0.0

    def _touching(self, moves: Sequence[Moves]) -> list[Copy]:
        if not self._under_way:
            return []
        found = [self._of(self._pages[group], pages) for group, pages, _ in moves]
        found += [self._of(self._slots[group], slots) for group, _, slots in moves]
        return list({id(copy): copy for copies in found for copy in copies}.values())

    def _of(self, numbers: np.ndarray, places: Int32Array) -> list[Copy]:
        """Those under way that read or write these places."""
        found = np.unique(numbers[places]).tolist()
        return [self._under_way[number].copy for number in found if number in self._under_way]

    def _queue(self, moves: Sequence[Moves], copy: Copy, *, up: bool) -> None:
        self._number += 1
        for group, pages, slots in moves:
            self._pages[group][pages] = self._slots[group][slots] = self._number
            if up:
                self._up[group][pages] = self._number
        num_bytes = sum(slots.size * self._page_bytes[group] for group, _, slots in moves)
        self._under_way[self._number] = QueuedCopy(copy, num_bytes, up)
        self._num_bytes += num_bytes
        if copy.is_done():
            self._forget(self._number)
        while self._num_bytes > MOST_BYTES and len(self._under_way) > 1:
            oldest = next(iter(self._under_way))
            self._under_way[oldest].copy.finish()
            self._forget(oldest)

    def _forget(self, number: int) -> None:
        copy, num_bytes, up = self._under_way.pop(number)
        self._num_bytes -= num_bytes
        if up and num_bytes and copy.seconds:
            self._past_bytes = FORGET * self._past_bytes + num_bytes
            self._past_seconds = FORGET * self._past_seconds + copy.seconds


class QueuedCopy(NamedTuple):
    copy: Copy
    num_bytes: int
    up: bool


class MadeCopy(NamedTuple):
    """A Copy that was made at once."""

    seconds: float

    def is_done(self) -> bool:
        return True

    def wait(self, stage: int | None = None) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectLanes:
    """Makes copies at once, on a CPU."""

    def __init__(self, pools: Sequence[Tensor] = (), memory: Sequence[Tensor] = ()) -> None:
        """Of each layer group its pool [num_pages, n], and [num_slots, n] of the store's memory."""
        self._pools, self._memory = pools, memory

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> MadeCopy:
        began = time.perf_counter()
        for group, pages, slots in moves:
            pool, memory = self._pools[group], self._memory[group]
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                if up:
                    pool[page].copy_(memory[slot])
                else:
                    memory[slot].copy_(pool[page])
        seconds = time.perf_counter() - began
        if last is not None:
            last()
        return MadeCopy(seconds)


NO_COPIES = PageCopies(DirectLanes())
"""Of a cache without a store."""
