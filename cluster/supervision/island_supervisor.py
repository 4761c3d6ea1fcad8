"""The supervisor of one island.

Workers of an elastic island come and go alone, by losses and orders. In other islands a lost worker ends the whole
island, and the next epoch takes its place.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, ReshapeFailed, ScaleRefused, TandemError
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOrders, ScaleOutcome, Shape
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.islands.elastic_island import ElasticIsland
from tandem.cluster.supervision.islands.island_account import IslandAccount
from tandem.cluster.supervision.islands.worker_changes import GATEWAY_SECONDS, WorkerChanges
from tandem.cluster.supervision.supervisor import Supervisor

DRAIN_POLL_SECONDS = 0.02
log = logging.getLogger(__name__)


class IslandSupervisor(Supervisor):
    """Keeps one island running. island_of: makes the island of an epoch and shape, not yet launched."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        island_of: Callable[[int, Shape], Island],
        membership: Membership,
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
        num_pages: int | None = None,
    ) -> None:
        """num_pages: of each worker; None: as many as fit in the first epoch."""
        super().__init__(f"island {name}", recovery, failed)
        self.island_name = name
        self._island_of = island_of
        self._account = IslandAccount(name, membership, self._budget)
        self._num_pages = num_pages
        self._orders = ScaleOrders()
        self._reshapes = False
        self.island = island_of(self._account.epoch, shape)

    @property
    def num_pages(self) -> int:
        """The number of pages of each worker, in every epoch; 0 before the first."""
        return self._num_pages or 0

    @property
    def is_reshaping(self) -> bool:
        """True while an order is under way or waits. Any thread may ask."""
        return self._reshapes or self._orders.first.done()

    def scale(self, order: ScaleOrder) -> Future[ScaleOutcome]:
        """Gives the island another shape, in the order's turn. From any thread.

        The outcome comes once the gateway knows the new shape, or is gone. ScaleRefused: the island serves on as it
        was. Other errors: the island is started again as it was.
        """
        return self._orders.add(order)

    def retire(self) -> None:
        """Ends the island for good, and returns then. Requests have recovery.drain_seconds to finish."""
        if self.ready.done() and self.ready.exception() is None:
            self._stop_admission()
        self.stop()
        self.join()
        self._account.remove()

    def _begin(self) -> None:
        self._bring_up()
        self.island.form(self._num_pages)
        self._num_pages = self.island.num_pages
        self._account.tell(self.island)
        epoch, seconds = self._account.epoch, self.island.clock.seconds
        log.info("island %s serves in epoch %d; seconds: %s", self.island_name, epoch, seconds)

    def _bring_up(self) -> None:
        """Calls launch() and load(). In later starts a lost member is replaced alone, once, within the budget of
        restarts. The first start fails with the member."""
        bring_up = partial(self.island.launch, self._stop)
        while True:
            try:
                bring_up()
                self.island.load()
                return
            except ProcessEnded as lost:
                alone = self.ready.done() and self.island.may_replace(lost)
                if not alone or not self._budget.take(time.monotonic()):
                    raise
                log.warning("a worker of island %s is started again: %s", self.island_name, lost)
                bring_up = partial(self.island.replace, lost)

    def _watch(self) -> NoReturn:
        while True:
            self._reshapes = False
            try:
                self.island.wait_for(self._orders.first)
            except ProcessEnded as lost:
                self._replace(lost)
                continue
            self._reshapes = True
            order, outcome = self._orders.take()
            before = self.island.shape
            try:
                scaled, updates = self._reshape(order.shape(before))
                _after(updates, partial(outcome.set_result, scaled))
            except ScaleRefused as error:
                outcome.set_exception(ScaleRefused(f"{order.words}: {error}"))
            except BaseException as error:
                keeps = "keeps its shape" if self.island.shape == before else "has another shape"
                outcome.set_exception(
                    ReshapeFailed(f"island {self.island_name} {keeps}, and is started again: {error}")
                )
                raise

    def _replace(self, lost: ProcessEnded) -> None:
        """Replaces the lost worker if its peers can go on without it. Otherwise raises its loss."""
        if not isinstance(self.island, ElasticIsland):
            raise lost
        self._changes(self.island).replace(lost)

    def _changes(self, island: ElasticIsland) -> WorkerChanges:
        return WorkerChanges(island, self._account, self._recovery, self._budget, self._stop)

    def _reshape(self, shape: Shape) -> tuple[ScaleOutcome, list[Future[Any]]]:
        """Returns the outcome, and the calls that update the gateway."""
        before = self.island
        if shape == before.shape:
            kept = len(shape.roles)
            epoch = self._account.epoch
            return ScaleOutcome(self.island_name, epoch, shape, kept, started=0, ended=0, seconds_away=0.0), []
        if isinstance(before, ElasticIsland) and before.takes(shape):
            return self._changes(before).reshape(shape)
        return self._form_anew(shape)

    def _form_anew(self, shape: Shape) -> tuple[ScaleOutcome, list[Future[Any]]]:
        """Carries out _reshape() through a new epoch of all workers."""
        before, epoch = self.island, self._account.draw()
        after = self._island_of(epoch, shape)
        try:
            started = after.extend(before)
        except ProcessEnded:
            raise
        except TandemError as error:
            raise ScaleRefused(f"island {self.island_name} keeps serving as before: {error}") from error
        away = time.monotonic()
        self._stop_admission()
        try:
            after.take_over(before)
        except ProcessEnded:
            raise
        except TandemError as error:
            raise ReshapeFailed(f"the island was not formed anew: {error}") from error
        self.island, self._account.epoch = after, epoch
        updates = self._account.tell(after)
        kept = len(shape.roles) - started
        ended = len(before.shape.roles) - kept
        return ScaleOutcome(self.island_name, epoch, shape, kept, started, ended, time.monotonic() - away), updates

    def _clear(self, lost: TandemError) -> None:
        """Ends the epoch: admission stops, the survivors finish what they can, then all processes end."""
        before = self.island
        if isinstance(lost, ProcessEnded):
            before.end_other_ranks(lost)
        self._stop_admission()
        self._account.epoch = self._account.draw()
        self.island = self._island_of(self._account.epoch, before.shape)
        self.island.succeed(before)

    def _stop_admission(self) -> None:
        """Returns when the island has no requests any more, or after recovery.drain_seconds."""
        cut_off: frozenset[int] | None = None
        deadline = time.monotonic() + self._recovery.drain_seconds
        while cut_off is None or time.monotonic() < deadline:
            if cut_off != self.island.cut_off:  # another worker may report a loss before its host was silent for long
                cut_off = self.island.cut_off
                self._stop.answers(self._account.tell_stopped(cut_off), GATEWAY_SECONDS)
            asked = self._account.ask_placed_tokens()
            # Nobody reads what workers would still generate for a lost gateway process.
            if not any(self._stop.answers(asked, GATEWAY_SECONDS)):
                return
            self._stop.wait_any((), DRAIN_POLL_SECONDS)

    def _end(self) -> None:
        self._orders.close(ScaleRefused(f"island {self.island_name} is stopped"))
        self.island.end(gently=self.island.formed)  # a gateway process that still starts may not answer for a while


def _after(calls: list[Future[Any]], act: Callable[[], None]) -> None:
    """Acts once all calls have ended, with a result or an error; at once without calls."""
    if calls:
        calls[0].add_done_callback(lambda _: _after(calls[1:], act))
    else:
        act()
