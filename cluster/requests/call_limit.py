"""How much may be under way at a gateway: calls through all frontends, and connections."""

import asyncio
import resource

from tandem.cluster.errors import Overloaded


class CallLimit:
    """Counts calls from admit() until their tasks are done. Owned by the gateway's event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: set[asyncio.Task[object]] = set()

    def admit(self) -> None:
        """Counts the calling task. Raises Overloaded when the limit is reached."""
        if len(self._calls) >= self._most:
            reason = f"{len(self._calls)} calls are under way; gateway.max_calls is {self._most}"
            raise Overloaded(reason)
        call = asyncio.current_task()
        assert call is not None, "a frontend answers each call in a task"
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)


def connections_per_frontend() -> int:
    """The most that one frontend may hold. The other one and the gateway itself need files, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft // 3)
