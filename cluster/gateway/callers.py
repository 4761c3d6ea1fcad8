"""Knows a gateway process's callers: by the operator's token, and by the keys of the file."""

from collections.abc import Coroutine
from typing import Any

from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.keys.book import KeyBook
from tandem.cluster.keys.far_counts import FarCounts
from tandem.cluster.keys.gate import Gate
from tandem.cluster.metrics.request_metrics import RequestMetrics
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.table import GatewayTable
from tandem.workers.ports.authentication import BearerToken


class Callers:
    """Owned by the gateway's event loop."""

    def __init__(
        self, settings: GatewaySettings, table: GatewayTable, metrics: RequestMetrics, links: PeerLinks
    ) -> None:
        path, token = settings.config.security.keys_file, settings.security.token()
        self.book = None
        if path is not None:
            self.book = KeyBook(path, table, metrics.keys_file_failed, tells=settings.process == 0)
        self._far = [] if self.book is None or settings.peers is None else [FarCounts(table, links, self.book.all)]
        self.gate = Gate(None if token is None else BearerToken(token).admits, self.book)

    async def start(self) -> None:
        """Reads the file. If it cannot be used, only the log says so: `tandem up` has read it before."""
        if self.book is not None:
            await self.book.look()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the tasks that run beside the calls."""
        return [] if self.book is None else [self.book.run(), *(one.run() for one in self._far)]
