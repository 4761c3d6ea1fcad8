"""How much may be under way at a gateway: calls, whichever doors they came through, and connections."""

import asyncio
import resource

from tandem.cluster.errors import Overloaded

RETRY_SECONDS = 1.0  # what is advised when a worker or a door, and not the queue, is full


class CallLimit:
    """Counts calls from admit() until their tasks are done. Owned by the gateway's event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: set[asyncio.Task[object]] = set()

    def admit(self) -> None:
        """Counts the task that calls this. Overloaded when as many as may be are under way already."""
        if len(self._calls) >= self._most:
            reason = f"{len(self._calls)} calls are under way; gateway.max_calls is {self._most}"
            raise Overloaded(reason, RETRY_SECONDS)
        call = asyncio.current_task()
        assert call is not None, "a door answers each call in a task"
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)


def connections_of_a_door() -> int:
    """The most that one may hold: the other door, and what the gateway itself opens, have files left."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft // 3)
