"""Writes that are still under way when a request ends at its sender."""

import logging
from concurrent.futures import Future

from tandem.transfer.transport import Fence
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import WriterNotQuiet
from tandem.workers.logs import of_requests
from tandem.workers.requests.prefill_request import PrefillRequest
from tandem.workers.wire.lease import Clock

log = logging.getLogger(__name__)

QUIET_SECONDS = 8.0  # until the callers of a request hear that its writes may still land, unless a link may be down


class DrainingWrites:
    """The writes of one request, which issues no more. Answers its callers once all are quiet.

    Until then the writes may read the sender's pages and change the receiver's, however long it takes. At the deadline
    the callers only stop waiting. Owned by the step thread.
    """

    def __init__(self, engine: Engine, request: PrefillRequest, error: Exception | None, clock: Clock) -> None:
        """error: what the request's caller gets once all is quiet; None: its result."""
        self.request = request
        self._engine = engine
        self._error = error
        self._clock = clock
        self._seconds = QUIET_SECONDS if error is not None else max(QUIET_SECONDS, engine.silent_seconds)
        self._began = clock()
        self._fence: Fence | None = None
        self._failure: Exception | None = None
        self._aborts: list[Future[bool]] = []
        self.overdue = False
        self._ask()

    @property
    def failed(self) -> bool:
        """Returns whether the request ended without its result."""
        return self._error is not None

    def is_quiet(self) -> bool:
        """Returns whether no write is under way any more. At the deadline it tells callers that it does not know."""
        if self._ask():
            return True
        if not self.overdue and self._clock() >= self._began + self._seconds:
            self.overdue = True
            log.error("%s", self._not_quiet(), extra=of_requests(self.request))
            self._give_up()
        return False

    def finish(self) -> None:
        """Answers the callers that still wait, once all writes are quiet."""
        if not self.overdue:
            if self._error is None:
                self.request.result.set_result(self.request.completed())
            else:
                self.request.result.set_exception(self._error)
        for answer in self._aborts:
            answer.set_result(True)

    def abort(self) -> "Future[bool]":
        """Ends with True once all is quiet; with WriterNotQuiet at the deadline, at once when that is over."""
        answer: Future[bool] = Future()
        self._hasten()
        if self.overdue:
            answer.set_exception(self._not_quiet())
        else:
            self._aborts.append(answer)
        return answer

    def _ask(self) -> bool:
        """Asks whether the writes are quiet. If asking fails, the next call asks a later fence, after the same
        writes."""
        try:
            if self._fence is None:
                self._fence = self._engine.fence(self.request.reservation.target_pe)
            return self._fence.is_quiet()
        except Exception as failure:
            self._fence, self._failure = None, failure
            self._hasten()
            return False

    def _hasten(self) -> None:
        """Stops waiting longer for a link that may come back than for anything else."""
        self._seconds = min(self._seconds, self._clock() - self._began + QUIET_SECONDS)

    def _give_up(self) -> None:
        self.request.result.set_exception(self._not_quiet())
        for answer in self._aborts:
            answer.set_exception(self._not_quiet())
        self._aborts.clear()

    def _not_quiet(self) -> WriterNotQuiet:
        reason = f": {self._failure}" if self._failure else ""
        return WriterNotQuiet(
            f"request {self.request.request_id!r}: writes to PE {self.request.reservation.target_pe} may still land "
            f"after {self._seconds:.0f} s{reason}"
        )
