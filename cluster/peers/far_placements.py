"""Learns what other hosts' gateways have placed on workers, so that hosts do not all choose the same worker."""

import asyncio

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.table import GatewayTable

PERIOD_SECONDS = 0.1  # between two questions; so old a load may be


class FarPlacements:
    """Asks one process of each other host again and again, and tells the sum to all processes of this one.

    One process of each host runs it, on its event loop. A host that does not answer counts for nothing: either its
    gateway is lost, and workers drop what it had placed, or the next answer comes soon.
    """

    def __init__(self, table: GatewayTable, links: PeerLinks) -> None:
        self._table = table
        self._links = links

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_SECONDS)

    async def look(self) -> None:
        """Asks all hosts once, at the same time."""
        total: Int64Array = np.zeros_like(self._table.placed)
        for cells, tokens in await self._links.placed():
            known = cells < len(total)
            np.add.at(total, cells[known], tokens[known])
        self._table.put_far(total)
