"""LoRA adapters in a gateway process: the names, the workers that hold them, and the changes that operators ask for."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from tandem.cluster.adapters.book import AdapterBook
from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import Adapter, AdapterOrder, AdapterSet
from tandem.cluster.errors import StartFailed
from tandem.cluster.frontends.adapters.changes import AdapterChanges
from tandem.cluster.frontends.orders import Orders
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.routing.adapter_loads import AdapterLoads
from tandem.cluster.routing.islands import Islands

BRING_SECONDS = 10.0  # for workers that have come to get their adapters before they take requests
COMMIT_SECONDS = 15.0  # for the launcher to tell all processes


class ServedAdapters:
    """Owned by the gateway's event loop. route() comes before all but `names`."""

    def __init__(self, settings: GatewaySettings, orders: Orders) -> None:
        # The launcher tells a process of changes once it serves.
        self.names = ServedNames(settings.config.model.names, settings.adapters, settled=not settings.table)
        self._section = settings.config.adapters
        self._orders = orders
        self._starts = settings.incarnation == 1
        self._brings = self._section.is_on and settings.process == 0  # one process of a host is enough
        # The launcher has the book, and tells all processes. A process without one keeps it itself.
        self._book = None if settings.table else AdapterBook(self._section.max_adapters, settings.adapters)

    def route(self, islands: Islands) -> AdapterChanges:
        """Makes the route that changes the adapters. islands: their workers get them."""
        self._loads = AdapterLoads(islands, self.names)
        self.changes = AdapterChanges(self._section, self.names, self._loads, islands, self._commit)
        return self.changes

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the tasks that run beside the calls."""
        return [self._loads.run()] if self._brings else []

    async def bring(self) -> None:
        """Brings all adapters to workers that have come. When this returns they hold all, or get the rest while they
        serve.

        Raises StartFailed if the configuration's adapters cannot be served at the cluster's start.
        """
        if not self._brings:
            return
        failed = ""
        with suppress(TimeoutError):
            failed = await asyncio.wait_for(self._loads.bring(), BRING_SECONDS)
        starts, self._starts = self._starts, False
        if starts and failed:
            raise StartFailed(f"adapters.folders: {failed}")

    def update(self, adapters: AdapterSet) -> None:
        """Takes the adapters that are served from now on. A set that is older than the last is ignored."""
        if self.names.update(adapters):
            self._loads.look()

    async def _commit(self, name: str, adapter: Adapter | None, before: bytes) -> AdapterSet:
        """See Commit."""
        order = AdapterOrder(self._orders.next_number(), name, adapter, before)
        if self._book is None:
            changed: AdapterSet = await self._orders.carry_out(order, COMMIT_SECONDS)
        else:
            changed = self._book.change(order)
        self.update(changed)
        return changed
