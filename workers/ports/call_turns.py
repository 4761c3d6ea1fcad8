"""Chooses the next call to begin, where clients send calls faster than a server looks at them.

gRPC keeps calls in one line, whatever connections they came over. A call at its end waits for all others, including
cancelled ones: 0.1 to 0.3 ms of the event loop each. So few calls are let into that line, from one connection after
another. The others stay in their connections, where TCP slows down their senders.
"""

import asyncio
from enum import Enum, auto
from typing import Protocol

CALLS_AHEAD = 8  # that the server has not looked at: enough that it never waits for one
CALLS_A_TURN = 4  # of one connection
FRAMES_A_TURN = 64  # of one connection: about 0.1 ms
CONNECTIONS_A_TURN = 16
LOST_SECONDS = 0.01  # without a look at a call; those that were ahead were none, such as headers without a path


class Rest(Enum):
    """The rest of a connection's input."""

    NOTHING = auto()
    FRAMES = auto()
    CALL = auto()  # comes next


class Connection(Protocol):
    def pass_on(self, frames: int, calls: int) -> tuple[int, Rest]:
        """Sends at most so many frames and calls on to the server. How many calls, and what is left."""
        ...


class CallTurns:
    """Takes turns among the connections of one server. Owned by the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Connection, None] = {}  # in order
        self._blocked: dict[Connection, None] = {}
        self._ahead = 0
        self._looks = 0
        self._turn: asyncio.Handle | None = None
        self._watch: asyncio.TimerHandle | None = None

    def enter(self, connection: Connection) -> None:
        """Adds a connection that has something to pass on. Idempotent."""
        if connection not in self._ready and connection not in self._blocked:
            self._ready[connection] = None
            self._schedule()

    def leave(self, connection: Connection) -> None:
        """Removes a connection that is gone."""
        self._ready.pop(connection, None)
        self._blocked.pop(connection, None)

    def looked(self) -> None:
        """Notes that the server has looked at a call."""
        self._looks += 1
        self._ahead = max(0, self._ahead - 1)
        self._unblock()

    def _schedule(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._turn = None
        for _ in range(min(len(self._ready), CONNECTIONS_A_TURN)):
            connection = _first(self._ready)
            calls = min(CALLS_A_TURN, CALLS_AHEAD - self._ahead)
            passed, rest = connection.pass_on(FRAMES_A_TURN, calls)
            self._ahead += passed
            if rest == Rest.FRAMES:
                self._ready[connection] = None
            elif rest == Rest.CALL:
                self._blocked[connection] = None
        self._unblock()
        if self._ready:
            self._schedule()

    def _unblock(self) -> None:
        """Lets as many connections begin a call as the server allows."""
        free = CALLS_AHEAD - self._ahead
        if self._blocked and not free:
            self._watch = self._watch or self._loop.call_later(LOST_SECONDS, self._look_again, self._looks)
        for _ in range(min(free, len(self._blocked))):
            self._ready[_first(self._blocked)] = None
            self._schedule()

    def _look_again(self, looks: int) -> None:
        self._watch = None
        if looks == self._looks:
            self._ahead = 0
        self._unblock()


def _first(connections: dict[Connection, None]) -> Connection:
    """Takes out the first connection."""
    first = next(iter(connections))
    del connections[first]
    return first
