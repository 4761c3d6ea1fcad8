"""Limits what is under way at a gateway: calls through all frontends of all its processes, and connections."""

import asyncio
import resource

from tandem.cluster.errors import Overloaded
from tandem.cluster.peers.table import Column, GatewayTable


class CallLimit:
    """Counts calls from admit() until their tasks are done. Owned by the gateway's event loop."""

    def __init__(self, most: int, table: GatewayTable | None = None) -> None:
        """table: where the calls of all the gateway's processes are counted together; None: only this process's."""
        self._most = most
        self._table = table or GatewayTable.alone()

    def admit(self) -> None:
        """Counts the calling task. Raises Overloaded when the limit is reached."""
        call = asyncio.current_task()
        assert call is not None, "a frontend answers each call in a task"
        self._table.add(Column.CALLS, 1)  # before it looks, as all processes do: together they never admit too many
        others = self._table.total(Column.CALLS) - 1
        if others >= self._most:
            self._table.add(Column.CALLS, -1)
            raise Overloaded(f"{others} calls are under way; gateway.max_calls is {self._most}")
        call.add_done_callback(lambda _: self._table.add(Column.CALLS, -1))


def connections_per_frontend() -> int:
    """Returns the most connections of one frontend. The other frontend and the gateway itself need files, too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft // 3)
