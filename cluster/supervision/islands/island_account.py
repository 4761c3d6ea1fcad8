"""Tells the gateway the state of one island."""

import itertools
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from tandem.cluster.routing.membership import Membership
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.process_settings import FIRST_EPOCH
from tandem.cluster.supervision.supervisor import RestartBudget


class IslandAccount:
    """The island's epochs, and the states that follow from them. Owned by its supervisor's thread."""

    def __init__(self, name: str, membership: Membership, budget: RestartBudget) -> None:
        self.name = name
        self._membership = membership
        self._budget = budget
        self._epochs = itertools.count(FIRST_EPOCH)
        self.epoch = self.draw()  # the epoch that the gateway is told

    def draw(self) -> int:
        """Draws the number of the next epoch. A number is not used again, even if its epoch did not come about."""
        return next(self._epochs)

    def tell(
        self, island: Island, *, without: Collection[int] = (), leaving: Collection[int] = (), missing: int = 0
    ) -> list[Future[Any]]:
        """Tells the gateway the workers that serve: the island's, but for the PEs `without`. The gateway keeps its
        connections to workers that it knows. Returns the calls under way; see Membership.update."""
        workers = tuple(address for address in island.addresses if address.pe not in without)
        return self._membership.update(
            self.name, self.epoch, self._budget.used, workers, island.host, leaving=frozenset(leaving), missing=missing
        )

    def tell_stopped(self, cut_off: frozenset[int] = frozenset()) -> list[Future[Any]]:
        """Tells the gateway that the island takes no requests. cut_off: see IslandState."""
        return self._membership.update(self.name, self.epoch, self._budget.used, (), cut_off=cut_off)

    def ask_placed_tokens(self) -> list[Future[Any]]:
        """See Membership."""
        return self._membership.ask_placed_tokens(self.name)

    def ask_unfinished(self, pes: Collection[int], *, move: bool) -> list[Future[Any]]:
        """See Membership."""
        return self._membership.ask_unfinished(self.name, frozenset(pes), move=move)

    def remove(self) -> None:
        """Removes the island from the cluster."""
        self._membership.remove(self.name)
