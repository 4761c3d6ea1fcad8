"""Changes of the workers of an elastic island, by losses and by orders, while the other workers serve.

order   ─► join: new workers load, then take vacant places
           drain: the gateway gives the leaving ones nothing new, and moves what they have not finished in time
           let go: the gateway forgets them, their peers part with them, their processes end, or turn
loss    ─► part: their peers part with the lost ones ─► others take their places
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, ReshapeFailed, ScaleRefused, TandemError
from tandem.cluster.scaling import ScaleOutcome, Shape, plan_change
from tandem.cluster.supervision.islands.elastic_island import ElasticIsland
from tandem.cluster.supervision.islands.island_account import IslandAccount
from tandem.cluster.supervision.stop_signal import StopSignal
from tandem.cluster.supervision.supervisor import RestartBudget
from tandem.workers.config import Role

GATEWAY_SECONDS = 2.0  # longest wait for the gateway's processes to answer
MOVE_SECONDS = 10.0  # longest wait for requests that move; the rest is placed again
log = logging.getLogger(__name__)


class WorkerChanges:
    """One change at a time, on the thread of the island's supervisor.

    Raises a loss that the others cannot survive as it is; ReshapeFailed: a worker did not come about. Either ends the
    island's epoch.
    """

    def __init__(
        self,
        island: ElasticIsland,
        account: IslandAccount,
        recovery: RecoverySection,
        budget: RestartBudget,
        stop: StopSignal,
    ) -> None:
        self._island = island
        self._account = account
        self._recovery = recovery
        self._budget = budget
        self._stop = stop
        self._leaving: set[int] = set()  # PEs that get no more requests
        self._updates: list[Future[Any]] = []  # that tell the gateway of new workers, which are warm once they end

    def replace(self, lost: ProcessEnded, others: Collection[int] = ()) -> None:
        """Replaces a lost worker, and workers that are lost meanwhile. others: PEs that were to join, and do so with
        it."""
        island, pes = self._island, set(others)
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

    def reshape(self, shape: Shape) -> tuple[ScaleOutcome, list[Future[Any]]]:
        """Carries out IslandSupervisor's order: returns the outcome, and the calls that update the gateway.
        ScaleRefused: the island serves on as it was."""
        before = self._island.roles
        change = plan_change(before, shape, turn=self._island.turns)
        if change.joining:
            self._join(change.joining)
        if change.leaving or change.turning:
            self._drain({*change.leaving, *change.turning}, change.leaving)
        if change.turning:
            self._turn(change.turning)
        self._island.share_cores()
        started, ended = len(change.joining), len(change.leaving)
        kept = len(before) - ended
        name, epoch = self._account.name, self._account.epoch
        outcome = ScaleOutcome(name, epoch, shape, kept, started, ended, seconds_away=0.0)
        return outcome, [*self._updates, *self._tell()]

    def _join(self, roles: Sequence[Role]) -> None:
        island, epoch = self._island, self._account.draw()
        try:
            joined = island.add(roles, epoch)
        except TandemError as error:
            raise self._refused(error) from error
        try:
            self._seat(joined, epoch)
        except ProcessEnded as lost:
            if island.place_of(lost) in joined:
                self._dismiss(joined)
                raise self._refused(lost) from lost
            try:
                self.replace(lost, joined)
            except TandemError:
                island.drop(joined)  # the next epoch has the old shape
                raise
        except TandemError as error:
            self._dismiss(joined)
            raise self._refused(error) from error

    def _turn(self, roles: Mapping[int, Role]) -> None:
        epoch = self._account.draw()
        try:
            self._island.turn(roles, epoch)
            self._seat(roles, epoch)
        except ProcessEnded as lost:
            self.replace(lost, roles)
        except TandemError as error:
            raise ReshapeFailed(f"a worker did not get another role: {error}") from error

    def _seat(self, pes: Collection[int], epoch: int) -> None:
        """Raises the loss of a worker rather than an error of another that could not reach it."""
        try:
            self._island.seat(pes, epoch)
        except ProcessEnded:
            raise
        except TandemError:
            self._island.look()
            raise
        self._account.epoch = epoch
        self._updates += self._tell()

    def _drain(self, pes: Collection[int], leaving: Collection[int]) -> None:
        """Returns once the gateway has no requests at these workers, and the workers in `leaving` have left.

        Requests there have recovery.drain_seconds to end. Then they move to other workers, with their KV. What has not
        moved in time is placed again.
        """
        self._leaving = set(pes)
        told = self._tell()
        self._stop.answers(told, GATEWAY_SECONDS)
        moves = time.monotonic() + self._recovery.drain_seconds
        while self._leaving and (now := time.monotonic()) < moves + MOVE_SECONDS:
            asked = self._account.ask_unfinished(self._leaving, move=now >= moves)
            counts = self._stop.answers(asked, GATEWAY_SECONDS)
            if not any(counts) and all(call.done() for call in (*told, *asked)):  # a lost process's calls have ended
                break
            try:
                self._island.look()
            except ProcessEnded as lost:
                pe = self._island.place_of(lost)
                if pe is None or pe not in leaving:
                    self.replace(lost)
                    continue
                log.warning("a worker that was to leave island %s is lost: %s", self._account.name, lost)
                self._leaving.discard(pe)
                self._let_go({pe}, {pe})
        self._let_go(self._leaving, self._leaving.intersection(leaving))
        self._leaving.clear()

    def _let_go(self, pes: Collection[int], leaving: Collection[int]) -> None:
        """Makes the gateway end its work at these workers; those in `leaving` leave."""
        self._stop.answers(self._tell(without=pes), GATEWAY_SECONDS)
        if leaving:
            self._dismiss(leaving)

    def _dismiss(self, pes: Collection[int]) -> None:
        """Dismisses workers. A worker that is lost meanwhile is replaced."""
        try:
            self._island.dismiss(pes)
        except ProcessEnded as lost:
            self.replace(lost)

    def _tell(self, *, without: Collection[int] = (), missing: int = 0) -> list[Future[Any]]:
        return self._account.tell(self._island, without=without, leaving=self._leaving, missing=missing)

    def _refused(self, error: TandemError) -> ScaleRefused:
        return ScaleRefused(f"island {self._account.name} keeps serving as before: {error}")
