"""An asyncio event loop on a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def unwatched(future: "asyncio.Future[T]") -> "asyncio.Future[T]":
    """The same future, whose exception asyncio does not log when its caller went away before it came."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class EventLoopThread:
    """Runs coroutines for code that is not asynchronous. Owned by its maker; stop() is idempotent."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """The coroutine's result; TimeoutError after timeout seconds, and the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts it, and does not wait. The caller awaits its end, or cancels it, before stop()."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        if not self._loop.is_closed() and not self._loop.is_running():
            self._loop.close()
