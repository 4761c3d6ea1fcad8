"""Changes of the workers of an elastic island while the other workers serve."""

import logging
import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from tandem.cluster.errors import ProcessEnded, ReshapeFailed, TandemError
from tandem.cluster.supervision.islands.elastic_island import ElasticIsland
from tandem.cluster.supervision.islands.island_account import IslandAccount
from tandem.cluster.supervision.supervisor import RestartBudget

log = logging.getLogger(__name__)


class WorkerChanges:
    """One change at a time, on the thread of the island's supervisor.

    A loss that the others cannot go on with is raised as it is; ReshapeFailed: a worker did not come about. Either ends
    the island's epoch.
    """

    def __init__(
        self,
        island: ElasticIsland,
        account: IslandAccount,
        budget: RestartBudget,
    ) -> None:
        self._island = island
        self._account = account
        self._budget = budget

    def replace(self, lost: ProcessEnded) -> None:
        """Gives the place of a lost worker to another, and those of workers that are lost meanwhile."""
        island, pes = self._island, set[int]()
        while True:
            pe = island.lost_worker(lost)
            if pe is None or not self._budget.take(time.monotonic()):
                raise lost
            pes.add(pe)
            log.warning("a worker of island %s is replaced: %s", self._account.name, lost)
            try:
                island.part(pes)
                self._tell(without=pes, missing=len(pes))
                epoch = self._account.draw()
                island.restart(pes, epoch)
                self._seat(pes, epoch)
                return
            except ProcessEnded as another:
                lost = another
            except TandemError as error:
                raise ReshapeFailed(f"a worker was not replaced: {error}") from error

    def _seat(self, pes: Collection[int], epoch: int) -> None:
        self._island.seat(pes, epoch)
        self._account.epoch = epoch
        self._tell()

    def _tell(self, *, without: Collection[int] = (), missing: int = 0) -> list[Future[Any]]:
        return self._account.tell(self._island, without=without, missing=missing)
