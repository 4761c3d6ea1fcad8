"""SIGINT and SIGTERM while Ray starts or is joined: they wait until it has."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import ray._private.utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Signals that come inside the block are delivered behind it, to the handlers that were there before; the list has
    those that have come. In the main thread; others get no signals.

    A handler that raises could do so between a fork and Python's release of the lock of `logging`, which nobody takes
    again then: the process hangs. Ray's own handler of SIGTERM does, so it is not set.
    """
    came: list[int] = []
    if current_thread() is not main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    utils: Any = ray._private.utils
    set_handler = utils.set_sigterm_handler
    before = {number: signal.signal(number, note) for number in SIGNALS}
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield came
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
