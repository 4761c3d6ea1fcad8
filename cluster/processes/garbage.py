"""Decides when a process with an event loop collects garbage, and gives memory back."""

import asyncio
import gc
from collections.abc import Callable

from tandem.cluster.processes.heap import return_freed_memory
from tandem.workers.service.resident import resident_bytes

NEVER = 1 << 30
LOOK_SECONDS = 1.0
QUIET_LOOKS = 10  # one after the other, before memory is given back
LONGEST_SECONDS = 120.0  # without a full collection, for a process that is never idle
GROWN_BYTES = 64 << 20  # between two returns of memory, even if the process is never idle
LEAST_SECONDS = 10.0  # between two such times


class IdleCollections:
    """Runs full collections while the process is idle, because they look at all objects: with 500 streams for 50 ms.

    Python itself begins one whenever a quarter of the objects is new, which happens all the time under load. Young
    objects are collected as usual, which takes a millisecond or two. At the gateway a full collection finds asyncio's
    own cycle for each ended connection, some 1.5 KB. A flood of connections makes many cycles, so a process that has
    grown collects, too.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle

    async def run(self) -> None:
        """Collects garbage until it is cancelled. Objects that exist now are never looked at again."""
        gc.collect()
        gc.freeze()
        young, middle, _ = usual = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        try:
            await self._look()
        finally:
            gc.set_threshold(*usual)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        collected, quiet, low = loop.time(), 0, resident_bytes()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            quiet = quiet + 1 if self._is_idle() else 0
            resident, waited = resident_bytes(), loop.time() - collected
            low = min(low, resident)
            grown = waited > LEAST_SECONDS and resident - low > GROWN_BYTES
            *_, since = gc.get_count()  # collections of the middle generation
            if grown or (since and (quiet or waited > LONGEST_SECONDS)):
                gc.collect()
                collected = loop.time()
            if grown or quiet == QUIET_LOOKS:
                return_freed_memory()
                low = resident_bytes()
