"""The islands of a running cluster: their supervisors, and changes of their number."""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import InvalidRequest, ScaleRefused, StartFailed, TandemError
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, Shape
from tandem.cluster.supervision.island import Island, LoadState
from tandem.cluster.supervision.island_supervisor import IslandSupervisor
from tandem.cluster.supervision.process_settings import island_name, max_islands

IslandMaker = Callable[[str, int, Shape], Island]
"""Makes the island of a name, an epoch and a shape, not yet launched."""

READY_POLL_SECONDS = 0.2
log = logging.getLogger(__name__)


class IslandSet:
    """The islands. Owned by the cluster. Their number changes once at a time; a second change is refused meanwhile."""

    def __init__(
        self,
        config: ClusterConfig,
        island_of: IslandMaker,
        membership: Membership,
        failed: Callable[[TandemError], None],
    ) -> None:
        """failed: called for an island that was lost too often."""
        self._config = config
        self._island_of = island_of
        self._membership = membership
        self._failed = failed
        self._supervisors: dict[int, IslandSupervisor] = {}  # by their number, in the order of their starts
        self._changing = threading.Lock()
        self._closed = False

    @property
    def all(self) -> list[IslandSupervisor]:
        return list(self._supervisors.values())

    @property
    def count(self) -> int:
        return len(self._supervisors)

    @property
    def is_changing(self) -> bool:
        """True while the number of islands changes."""
        return self._changing.locked()

    @property
    def is_reshaping(self) -> bool:
        """True while an order for an island's shape is under way or waits."""
        return any(supervisor.is_reshaping for supervisor in self.all)

    @property
    def num_pages(self) -> int:
        """The number of pages that each worker has at least."""
        return min(supervisor.num_pages for supervisor in self.all)

    def progress(self) -> Sequence[LoadState]:
        return [state for supervisor in self.all for state in supervisor.island.progress()]

    def start(self, count: int | None = None) -> None:
        """Begins to start `count` islands, by default the configured number. Each has `ready`."""
        for number in range(self._config.num_islands if count is None else count):
            self._add(number, None)

    def scale(self, order: ScaleOrder) -> Future[ScaleOutcome]:
        """Gives an island another shape, or the cluster another number of islands. From any thread."""
        if order.num_islands is not None:
            return self._change(order.num_islands)
        named = [one for one in self.all if order.island in (one.island_name, "")]
        if len(named) == 1:
            return named[0].scale(order)
        names = ", ".join(one.island_name for one in self.all)
        return _refused(InvalidRequest(f"island is {order.island!r}; it must be one of {names}"))

    def release(self, prefix: str) -> None:
        """Calls Island.release on all islands; does not wait."""
        for supervisor in self.all:
            # A stopped worker answers late, and nobody waits for it.
            threading.Thread(target=supervisor.island.release, args=(prefix,), name="release", daemon=True).start()

    def stop(self) -> None:
        """Ends all islands; a change under way ends with an error. Idempotent."""
        self._closed = True
        for supervisor in self.all:
            supervisor.stop()
        for supervisor in self.all:
            supervisor.join()
        with self._changing:  # islands that it has started since are among them
            for supervisor in self.all:
                supervisor.stop()
                supervisor.join()
        self._supervisors.clear()

    def _add(self, number: int, num_pages: int | None) -> IslandSupervisor:
        section = self._config.island
        name = island_name(self._config, number)
        supervisor = IslandSupervisor(
            name,
            Shape(section.num_prefill, section.num_decode),
            partial(self._island_of, name),
            self._membership,
            self._config.recovery,
            self._failed,
            num_pages,
        )
        self._supervisors[number] = supervisor
        supervisor.start()
        return supervisor

    def _change(self, wanted: int) -> Future[ScaleOutcome]:
        most = max_islands(self._config)
        if not 1 <= wanted <= most:
            return _refused(
                InvalidRequest(f"num_islands is {wanted}; it must be from 1 to {most} (scaling.max_islands)")
            )
        if self._closed or not self._changing.acquire(blocking=False):
            return _refused(ScaleRefused("the number of islands is changing already, or the cluster stops"))
        outcome: Future[ScaleOutcome] = Future()

        def change() -> None:
            try:
                result = self._grow(wanted) or self._shrink(wanted)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)
            finally:
                self._changing.release()

        threading.Thread(target=change, name="islands", daemon=True).start()
        return outcome

    def _grow(self, wanted: int) -> ScaleOutcome | None:
        """Starts islands; None if there are enough. All of the new islands serve, or none."""
        missing = wanted - len(self._supervisors)
        if missing <= 0:
            return None
        kept, num_pages = len(self._supervisors), self.num_pages
        free = (number for number in itertools.count() if number not in self._supervisors)
        numbers = list(itertools.islice(free, missing))
        added = [self._add(number, num_pages) for number in numbers]
        try:
            self._wait_for(added)
        except TandemError as error:
            for number in numbers:
                self._remove(number)
            raise ScaleRefused(f"the islands keep serving as before: {error}") from error
        return self._outcome(kept, started=missing, ended=0)

    def _wait_for(self, added: Sequence[IslandSupervisor]) -> None:
        pending = {one.ready for one in added}
        while pending:
            done, pending = wait(pending, READY_POLL_SECONDS, FIRST_COMPLETED)
            for ready in done:
                ready.result()
            if self._closed:  # an island that is told to stop while it starts is never ready
                raise StartFailed("the cluster stops")

    def _shrink(self, wanted: int) -> ScaleOutcome:
        """Ends the newest islands. Their unfinished requests are placed on others."""
        gone = list(self._supervisors)[wanted:]
        kept = len(self._supervisors) - len(gone)
        retiring = [threading.Thread(target=self._remove, args=(number,), name="retire") for number in gone]
        for one in retiring:
            one.start()
        for one in retiring:
            one.join()
        return self._outcome(kept, started=0, ended=len(gone))

    def _remove(self, number: int) -> None:
        supervisor = self._supervisors[number]
        with suppress(TandemError):
            supervisor.retire()
        del self._supervisors[number]

    def _outcome(self, kept: int, *, started: int, ended: int) -> ScaleOutcome:
        section = self._config.island
        shape = Shape(section.num_prefill, section.num_decode)
        log.info("%d islands serve: %d started, %d ended", kept + started, started, ended)
        return ScaleOutcome("", 0, shape, kept, started, ended, 0.0, num_islands=kept + started)


def _refused(error: TandemError) -> Future[ScaleOutcome]:
    refused: Future[ScaleOutcome] = Future()
    refused.set_exception(error)
    return refused
