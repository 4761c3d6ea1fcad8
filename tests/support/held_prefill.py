"""Holds prefill workers back so that several requests are certainly there at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event

from tests.support.island import Island

POLL_SECONDS = 0.005


@contextmanager
def prefill_held(island: Island, requests: int) -> Iterator[None]:
    """Keeps prefill workers from computing anything, even ahead of a reservation, before so many requests have come to
    all of them together."""
    all_loops = [worker._loop for worker in island.workers if worker._loop is not None]
    loops = [loop for loop in all_loops if loop.prefills is not None]
    all_prefills = [loop.prefills for loop in loops if loop.prefills is not None]
    all_there = Event()

    def held(step: Callable[[], float | None]) -> float | None:
        if not all_there.is_set() and sum(len(prefills._handoff._requests) for prefills in all_prefills) < requests:
            return POLL_SECONDS
        all_there.set()
        return step()

    for loop in loops:
        loop.step = partial(held, loop.step)  # type: ignore[method-assign]
    for prefills in all_prefills:
        prefills.speculate = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for loop in loops:
            del loop.step
        for prefills in all_prefills:
            del prefills.speculate
