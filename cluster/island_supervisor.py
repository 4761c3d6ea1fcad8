"""Keeps one island running. A lost worker ends its whole island, and the next epoch takes its place."""

import time
from collections.abc import Callable
from typing import NoReturn

from tandem.cluster.config import RecoverySection
from tandem.cluster.errors import TandemError
from tandem.cluster.island import Island
from tandem.cluster.membership import Membership
from tandem.cluster.process_settings import FIRST_EPOCH
from tandem.cluster.supervisor import Supervisor

GATEWAY_SECONDS = 2.0  # longest wait for the gateway to answer
DRAIN_POLL_SECONDS = 0.1


class IslandSupervisor(Supervisor):
    """island_of makes the island of a given epoch, not yet launched."""

    def __init__(
        self,
        name: str,
        island_of: Callable[[int], Island],
        membership: Membership,
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
    ) -> None:
        super().__init__(f"island {name}", recovery, failed)
        self._island_name = name
        self._island_of = island_of
        self._membership = membership
        self._epoch = FIRST_EPOCH
        self._num_pages: int | None = None
        self.island = island_of(FIRST_EPOCH)

    def _begin(self) -> None:
        self.island.launch(self._stop)
        self.island.load()
        workers = self.island.form(self._num_pages)
        self._num_pages = self.island.num_pages
        self._membership.update(self._island_name, self._epoch, self._budget.used, workers)

    def _watch(self) -> NoReturn:
        self.island.watch()

    def _clear(self) -> None:
        """Admission stops, what survives finishes what it can, then all processes end: the epoch is over."""
        told = self._membership.update(self._island_name, self._epoch, self._budget.used, ())
        try:
            self._stop.results(told, GATEWAY_SECONDS)
            self._drain()
        except (TandemError, TimeoutError):
            pass  # without the gateway nobody reads what the survivors would still generate
        self.island.end(gently=False)
        self._epoch += 1
        self.island = self._island_of(self._epoch)

    def _drain(self) -> None:
        deadline = time.monotonic() + self._recovery.drain_seconds
        while time.monotonic() < deadline:
            asked = self._membership.ask_placed_tokens(self._island_name)
            if not asked or self._stop.results(asked, GATEWAY_SECONDS) == [0]:
                return
            self._stop.wait_any((), DRAIN_POLL_SECONDS)

    def _end(self) -> None:
        self.island.end(gently=True)
