"""The sending side of a handoff: what this worker may write into its peers, and until when.

          begin()             drain()               quiet
granted ──────────► written ──────────► draining ──────────► ended
   │ end(): nothing was written                                ▲
   └───────────────────────────────────────────────────────────┘
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.completion import pack_signal
from tandem.transfer.errors import TransportError
from tandem.transfer.recall import Recall
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import Aborted, LeaseExpired
from tandem.workers.handoff.draining import DrainingWrites
from tandem.workers.handoff.ended_requests import EndedRequests
from tandem.workers.handoff.grants import Grants, signal_of
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.post import DigestRange, Post
from tandem.workers.requests.prefill_request import PrefillRequest, PrefillResult
from tandem.workers.requests.prompt import Prompt
from tandem.workers.wire.lease import WRITER_FRACTION, Clock, Lease
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)

RECALL_POLL_SECONDS = 0.02
# A push is nearly always through when its last token is sampled: its answer should not wait for another's forward.
PATIENCE_SECONDS = 0.002
QUIET_POLL_SECONDS = 0.00002  # meanwhile the event loop has the interpreter, for the first token

Stop = Callable[[PrefillRequest, Exception], None]
"""Ends the computing of a request, and calls end() or drain() for it."""


class Handoff:
    """Grants, recalls, fences and posts of the requests that this worker prefills. Owned by the step thread.

    However a request ends, its pages stay until its writes are quiet, and so does the answer to a recall.
    """

    def __init__(
        self,
        engine: Engine,
        retired: RetiredSequences,
        counters: Counters,
        settings: LoopSettings,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._retired = retired
        self._counters = counters
        self._verify = settings.verify
        self._clock = clock
        self._grants = Grants(engine, counters)
        self._requests: dict[str, PrefillRequest] = {}  # by id, until their writes are quiet
        self._draining: dict[str, DrainingWrites] = {}
        self._ended = EndedRequests()
        self._recalls_read = -RECALL_POLL_SECONDS

    # Requests

    def known(self, request_id: str) -> "Future[PrefillResult] | None":
        """The result of a request that runs or has ended; None for a new one. Raises Aborted."""
        if self._ended.is_aborted(request_id):
            raise Aborted(f"request {request_id!r} was aborted before it arrived")
        request = self._requests.get(request_id)
        return self._ended.result(request_id) if request is None else request.result

    def is_new(self, request_id: str) -> bool:
        """Returns whether nothing is known of the request, not even its end."""
        ended = self._ended.is_aborted(request_id) or self._ended.result(request_id) is not None
        return not ended and request_id not in self._requests

    def check(self, reservation: Reservation, num_tokens: int, border: int = 0) -> PositionMap:
        """See Grants.check."""
        return self._grants.check(reservation, num_tokens, border)

    def lease(self, reservation: Reservation) -> Lease:
        """Returns the lease of a request; it runs until attend()."""
        return Lease(reservation.lease_seconds * WRITER_FRACTION, self._clock)

    def begin(self, request: PrefillRequest) -> None:
        """Lets this worker write for the request from now on; check() came first."""
        self._grants.take(request.reservation)
        self._requests[request.request_id] = request

    def attend(self, request_id: str) -> Lease | None:
        """Returns the lease of a request, which does not run until the caller leaves it; None if the request has
        ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.lease.attend()
        return request.lease

    def find(self, request_id: str) -> PrefillRequest | None:
        """Returns a request whose writes are not known to be quiet."""
        return self._requests.get(request_id)

    def part(self, pe: int, error: Exception, stop: Stop) -> None:
        """Ends the requests of a receiver that was cut. No write to it is under way."""
        for request in [one for one in self._requests.values() if one.reservation.target_pe == pe]:
            stop(request, error)
        self.settle()
        self._grants.forget(pe)

    def refuse(self, request_id: str) -> None:
        """Aborts a request, even if it is yet to arrive."""
        self._ended.abort(request_id)

    def release(self, prefix: str) -> list[str]:
        """Calls refuse() for every request whose id begins with `prefix`. Returns the ids of requests that are here."""
        self._ended.release(prefix)
        return [known for known in self._requests if known.startswith(prefix)]

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    # Steps

    def upkeep(self, stop: Stop) -> None:
        """Stops requests that receivers want back or that nobody waits for, and drops requests that are quiet."""
        self._heed_recalls(stop)
        if self._requests:
            self._stop_expired(stop)
            self.settle()

    def post(self, request: PrefillRequest, row: int) -> Post:
        """Makes the completion signal, which carries the first token."""
        reservation, digest = request.reservation, None
        if self._verify:
            slides = None if reservation.wire_map is None else reservation.wire_map.sliding
            window = None if slides is None else (slides.window, slides.sink)
            digest = DigestRange(request.sequence_id, reservation.matched_tokens, request.num_tokens, window)
        signal = pack_signal(reservation.generation, request.position_map.num_tokens)
        return Post(row, reservation.target_pe, reservation.signal_slot, signal, digest)

    def finish(self, request: PrefillRequest, first: FirstToken) -> None:
        """See Destination. The caller gets the result once all writes are quiet."""
        request.sampled_at = time.perf_counter()
        request.first_token.set_result(first)
        self.drain(request, None)

    def fail(self, request: PrefillRequest, error: Exception) -> None:
        """See Destination."""
        self.drain(request, error)

    def drain(self, request: PrefillRequest, error: Exception | None) -> None:
        """Begins to drain a request that no forward has any more. error: why it has no result; its caller hears it once
        all is quiet."""
        self._draining[request.request_id] = DrainingWrites(self._engine, request, error, self._clock)

    def end(self, request: PrefillRequest, error: Exception) -> None:
        """Ends a request that has written nothing and holds no page."""
        self._forget(request)
        request.result.set_exception(error)

    def settle(self) -> None:
        """Forgets the requests whose writes are quiet by now."""
        for request_id, draining in list(self._draining.items()):
            if draining.is_quiet():
                del self._draining[request_id]
                self._forget(draining.request)
                if draining.failed:
                    self._retired.add(draining.request.sequence_id)
                else:  # the device came past its forwards before it came past its writes
                    self._engine.free(draining.request.sequence_id)
                    self._counters.pushes += 1
                    self._counters.bytes_pushed += draining.request.bytes_pushed
                draining.finish()

    def await_quiet(self, requests: Sequence[Prompt]) -> None:
        """Waits a moment for requests that drain."""
        until = time.monotonic() + PATIENCE_SECONDS
        self.settle()
        while any(request.request_id in self._draining for request in requests) and time.monotonic() < until:
            time.sleep(QUIET_POLL_SECONDS)
            self.settle()

    def when_quiet(self, request_id: str) -> "Future[bool]":
        """Ends with True once this worker does not write for the request; see DrainingWrites.abort."""
        draining = self._draining.get(request_id)
        return settled(True) if draining is None else draining.abort()

    def _heed_recalls(self, stop: Stop) -> None:
        """Stops writes that receivers recall, and answers once none is in flight any more."""
        if self._clock() - self._recalls_read < RECALL_POLL_SECONDS:
            return
        self._recalls_read = self._clock()
        recalls = self._grants.recalled()
        for recall in recalls:
            for request in self._recalled(recall):
                stop(request, Aborted(f"request {request.request_id!r} was ended by its receiver"))
        if recalls:
            self.settle()
        for recall in recalls:
            if self._recalled(recall):
                continue  # its writes drain: the recall stays unanswered, and is read again
            try:
                self._grants.answer(recall)
            except TransportError:
                log.exception("PE %d waits on for the answer to its recall", recall.pe)

    def _recalled(self, recall: Recall) -> list[PrefillRequest]:
        """Returns the requests for that use of the receiver's slot whose writes are not known to be quiet."""
        return [
            request
            for request in self._requests.values()
            if request.reservation.target_pe == recall.pe and signal_of(request.reservation) == recall.signal
        ]

    def _stop_expired(self, stop: Stop) -> None:
        """Stops requests whose lease is over. A draining request only waits for what it has written: its lease does not
        matter."""
        for request in [request for request in self._requests.values() if request.lease.is_over]:
            if request.request_id in self._draining:
                continue
            self._counters.expired_leases += 1
            reason = f"no call waited for request {request.request_id!r} for {request.lease.seconds:g} s"
            stop(request, LeaseExpired(reason))

    def _forget(self, request: PrefillRequest) -> None:
        """Forgets a request that writes no more and holds no page here. A call that comes again finds its result."""
        del self._requests[request.request_id]
        self._ended.add(request)


def settled(answer: bool) -> "Future[bool]":
    """Makes a future that has ended."""
    future: Future[bool] = Future()
    future.set_result(answer)
    return future
