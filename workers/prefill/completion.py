"""The end of a request on a prefill worker: it issues no more writes, but those it issued may still be under way."""

import logging
from concurrent.futures import Future

from tandem.transfer.transport import Fence, Transport
from tandem.workers.errors import WriterNotQuiet
from tandem.workers.prefill.request import PrefillRequest
from tandem.workers.wire.lease import Clock

log = logging.getLogger(__name__)

QUIET_SECONDS = 8.0  # until whoever waits for a request's end hears that its writes may still land


class Landing:
    """Waits for the writes of one request, and answers its callers. Owned by the step thread.

    error: what the request's caller gets once all is quiet; None: its result. Until then its pages may be read by
    the writes, and its receiver's be written, however long it takes: at the deadline callers only stop waiting.
    """

    def __init__(self, transport: Transport, request: PrefillRequest, error: Exception | None, clock: Clock) -> None:
        self.request = request
        self._transport = transport
        self._error = error
        self._clock = clock
        self._deadline = clock() + QUIET_SECONDS
        self._fence: Fence | None = None
        self._failure: Exception | None = None
        self._aborts: list[Future[bool]] = []
        self.overdue = False
        self._ask()

    def is_quiet(self) -> bool:
        """Whether all has landed, before or after the deadline, which tells the callers that wait then."""
        if self._ask():
            return True
        if not self.overdue and self._clock() >= self._deadline:
            self.overdue = True
            log.error("%s", self._not_quiet())
            self._give_up()
        return False

    def finish(self) -> None:
        """All is quiet: the callers that still wait get their answers."""
        if not self.overdue:
            if self._error is None:
                self.request.result.set_result(self.request.landed())
            else:
                self.request.result.set_exception(self._error)
        for answer in self._aborts:
            answer.set_result(True)

    def abort(self) -> "Future[bool]":
        """Ends with True once all is quiet; with WriterNotQuiet at the deadline, at once when that is over."""
        answer: Future[bool] = Future()
        if self.overdue:
            answer.set_exception(self._not_quiet())
        else:
            self._aborts.append(answer)
        return answer

    def _ask(self) -> bool:
        """Where that fails, a later fence, behind the same writes, is asked next time."""
        try:
            if self._fence is None:
                self._fence = self._transport.fence(self.request.reservation.target_pe)
            return self._fence.is_quiet()
        except Exception as failure:
            self._fence, self._failure = None, failure
            return False

    def _give_up(self) -> None:
        self.request.result.set_exception(self._not_quiet())
        for answer in self._aborts:
            answer.set_exception(self._not_quiet())
        self._aborts.clear()

    def _not_quiet(self) -> WriterNotQuiet:
        reason = f": {self._failure}" if self._failure else ""
        return WriterNotQuiet(
            f"request {self.request.request_id!r}: writes to PE {self.request.reservation.target_pe} may still land "
            f"after {QUIET_SECONDS:g} s{reason}"
        )
