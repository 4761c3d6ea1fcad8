"""Copies by the copy engines, on two CUDA streams."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.copy_engine import copy_all
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.store.copies import Copy, Moves

MOST_STAGES = 8
LEAST_BYTES = 128 << 10  # of a page in one stage, on average; links are slow with smaller copies


def stages_of(layers: Sequence[Sequence[int]], page_bytes: Sequence[int]) -> list[int]:
    """The first layer of each stage of copies up. layers: of each layer group."""
    count = 1 + max(layer for group in layers for layer in group)
    stages = min(max(sum(page_bytes) // LEAST_BYTES, 1), MOST_STAGES, count)
    return sorted({stage * count // stages for stage in range(stages)})


class StreamCopy:
    """A Copy with an event for each stage."""

    def __init__(self, began: torch.cuda.Event, events: Sequence[torch.cuda.Event]) -> None:
        self._began, self.events = began, events

    def is_done(self) -> bool:
        try:
            return self.events[-1].query()
        except RuntimeError:  # the device has failed, and nothing runs on it any more
            return True

    def wait(self, stage: int | None = None) -> None:
        torch.cuda.current_stream().wait_event(self.events[-1 if stage is None else min(stage, len(self.events) - 1)])

    def finish(self) -> None:
        self.events[-1].synchronize()

    @property
    def seconds(self) -> float:
        try:
            return self._began.elapsed_time(self.events[-1]) / 1e3
        except RuntimeError:
            return 0.0


class StreamLanes:
    """Lanes on a GPU. They hold the pools and the stores' memory, which must be pinned where they copy, and end once
    their copies are done."""

    def __init__(
        self,
        pools: Sequence[Tensor],
        memory: Sequence[Tensor],
        layers: Sequence[Sequence[int]],
        begins: Sequence[int],
    ) -> None:
        """pools: [num_pages, layers of the group, …] for each layer group. memory: [num_slots, n] for each, pages as
        bytes. layers: of each group. begins: the first layer of each stage."""
        self._device = pools[0].device
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]
        self._pools, self._memories = pools, list[Sequence[Tensor]]()
        self.extend(memory)
        self._page_bytes = [pool[0].nbytes for pool in pools]
        self._cuts = [strips(group, nbytes, begins) for group, nbytes in zip(layers, self._page_bytes, strict=True)]

    def copy(
        self, moves: Sequence[Moves], behind: Sequence[Copy], *, up: bool, last: Callable[[], None] | None = None
    ) -> StreamCopy:
        stream, events = self._streams[up], []
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for copy in behind:
                copy.wait()
            began = self._event(stream)
            stages = range(len(self._cuts[0]) - 1 if up else 1) if moves else ()
            for stage in stages:
                parts = [self._part(one, stage if up else None) for one in moves]
                in_memory, in_pools, sizes = map(np.concatenate, zip(*parts, strict=True))
                targets, sources = (in_pools, in_memory) if up else (in_memory, in_pools)
                if sizes.size:
                    copy_all(targets, sources, sizes, stream.cuda_stream)
                events.append(self._event(stream))
            if last is not None:
                last()
                events[-1:] = [self._event(stream)]
        return StreamCopy(began, events)

    def extend(self, memory: Sequence[Tensor]) -> None:
        self._memories.append(memory)
        weakref.finalize(self, _finish, self._streams)  # once a memory: at exit, the newest finalizer runs first

    def _part(self, moves: Moves, stage: int | None) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Addresses in memory and in the pool, and byte counts, for a stage; None: for all layers."""
        group, (begin, end) = moves.group, (0, self._page_bytes[moves.group])
        if stage is not None:
            begin, end = self._cuts[group][stage : stage + 2]
        pages, slots = (places.astype(np.int64) * self._page_bytes[group] for places in (moves.pages, moves.slots))
        if begin == end:
            pages = slots = pages[:0]
        memory, pool = self._memories[moves.memory][group].data_ptr(), self._pools[group].data_ptr()
        return memory + slots + begin, pool + pages + begin, np.full(pages.size, end - begin)

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def _finish(streams: Sequence[torch.cuda.Stream]) -> None:
    with suppress(RuntimeError):  # the device has failed, and nothing runs on it any more
        for stream in streams:
            stream.synchronize()


def strips(layers: Sequence[int], page_bytes: int, begins: Sequence[int]) -> list[int]:
    """Returns the byte at which each stage begins in a page of these layers, and the end of the last stage."""
    each = page_bytes // len(layers)
    return [each * sum(layer < begin for layer in layers) for begin in begins] + [page_bytes]
