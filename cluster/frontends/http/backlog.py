"""The bytes that connections have received and not parsed."""

import asyncio
from collections import deque
from collections.abc import Callable

A_TURN = 2  # connections that go on in one turn of the event loop


class Backlog:
    """Lets connections that received much go on in order, a few in each turn of the event loop.

    What has just come is parsed at once, as far as one turn of its connection goes. So a small request waits for none
    that take long to parse, however many there are. Owned by the event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def add(self, go_on: Callable[[], None]) -> None:
        """go_on: does a bounded part of a connection's work, and adds itself again where there is more."""
        self._waiting.append(go_on)
        if not self._runs:
            self._runs = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(min(A_TURN, len(self._waiting))):
            loop.call_soon(self._waiting.popleft())
        self._runs = bool(self._waiting)
        if self._runs:
            loop.call_soon(self._turn)
