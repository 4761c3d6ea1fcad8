"""The step loop of a prefill worker: chunks of prompts, several requests in one forward, KV pushed while computing."""

import logging
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tandem.cache.digest import digest_kv
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.position_map import PositionMap
from tandem.transfer.completion import pack_payload, pack_signal
from tandem.transfer.errors import TransportError
from tandem.transfer.transport import Transport
from tandem.transfer.wire_map import decode_map
from tandem.workers.counters import Counters
from tandem.workers.errors import Aborted, ForwardFailed, InvalidCall, LeaseExpired
from tandem.workers.grants import Grants, signal_of
from tandem.workers.lease import Clock, Lease
from tandem.workers.model_runner import ModelRunner
from tandem.workers.push_meter import PushMeter
from tandem.workers.reservation import Reservation
from tandem.workers.sample_batch import SampleBatch
from tandem.workers.sampling_params import SamplingParams
from tandem.workers.token_logprobs import TokenLogprobs

log = logging.getLogger(__name__)

ABORTED_IDS_REMEMBERED = 4096  # a RemoteSend that arrives after its Abort must not start
RESULTS_REMEMBERED = 1024  # a RemoteSend that arrives again gets the same answer
RECALL_POLL_SECONDS = 0.02
LEASE_SHARE = 0.8  # the writer stops before the receiver's own lease is over


@dataclass(frozen=True)
class PrefillResult:
    """What RemoteSend answers; seconds."""

    first_token: int
    logprobs: TokenLogprobs | None
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    bytes_pushed: int


@dataclass(eq=False)
class PrefillRequest:
    """One prompt on its way through the loop. computed counts positions whose KV is in the cache here."""

    request_id: str
    sequence_id: int
    token_ids: list[int]
    params: SamplingParams
    reservation: Reservation
    position_map: PositionMap
    lease: Lease
    result: "Future[PrefillResult]" = field(default_factory=Future)
    computed: int = 0
    cached_tokens: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    push_seconds: float = 0.0
    bytes_pushed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class PrefillLoop:
    """Owned by the step thread; every method runs there. First come, first served, within a budget of tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedKVCache,
        transport: Transport,
        meter: PushMeter,
        *,
        max_batch_tokens: int,
        sharing: bool,
        verify: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """verify: whether a digest of what was sent goes with the signal, for the receiver to compare."""
        self._runner = runner
        self._cache = cache
        self._transport = transport
        self._meter = meter
        self._max_batch_tokens = max_batch_tokens
        self._sharing = sharing
        self._verify = verify
        self._clock = clock
        self.counters = Counters()
        self._grants = Grants(transport, self.counters)
        self._recalls_read = -RECALL_POLL_SECONDS
        self._waiting: deque[PrefillRequest] = deque()
        self._running: list[PrefillRequest] = []
        self._by_id: dict[str, PrefillRequest] = {}
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._results: OrderedDict[str, Future[PrefillResult]] = OrderedDict()
        self._next_sequence = 1

    # Commands

    def submit(
        self, request_id: str, token_ids: list[int], params: SamplingParams, reservation: Reservation
    ) -> "Future[PrefillResult]":
        """Queues a prompt; the future ends when its first token is sampled and all its KV has landed.

        A second call with the same request_id gets the first one's future. Raises InvalidCall, InvalidPositionMap,
        Aborted, StaleEpoch, StaleReservation. The lease runs until attend().
        """
        if request_id in self._aborted:
            raise Aborted(f"request {request_id!r} was aborted before it arrived")
        if request_id in self._by_id:
            return self._by_id[request_id].result
        if request_id in self._results:
            return self._results[request_id]
        position_map = self._checked_map(token_ids, reservation)
        self._grants.take(reservation)
        lease = Lease(reservation.lease_seconds * LEASE_SHARE, self._clock)
        request = PrefillRequest(request_id, self._next_sequence, token_ids, params, reservation, position_map, lease)
        self._next_sequence += 1
        self._by_id[request_id] = request
        self._waiting.append(request)
        return request.result

    def attend(self, request_id: str) -> Lease | None:
        """The lease of a request, which does not run until the caller leaves it; None when the request has ended."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        request.lease.attend()
        return request.lease

    def abort(self, request_id: str) -> bool:
        """After it returns this worker writes no more for the request. False when it was not here."""
        self._aborted[request_id] = None
        while len(self._aborted) > ABORTED_IDS_REMEMBERED:
            self._aborted.popitem(last=False)
        request = self._by_id.get(request_id)
        if request is None:
            return False
        # Every step ends with quiet, so between steps no write of ours is in flight.
        self._drop(request)
        request.result.set_exception(Aborted(f"request {request_id!r} was aborted"))
        return True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    # Steps

    def step(self) -> float | None:
        self._heed_recalls()
        self._stop_expired()
        self._admit()
        chunks = self._next_chunks()
        if not chunks:
            return RECALL_POLL_SECONDS
        try:
            self._forward(chunks)
        except Exception as error:
            log.exception("a prefill forward failed")
            self._fail([request for request, _ in chunks], error)
        return 0 if self._running or self._waiting else RECALL_POLL_SECONDS

    def _heed_recalls(self) -> None:
        """Stops what receivers want back, and tells them when nothing of it is in flight any more."""
        if self._clock() - self._recalls_read < RECALL_POLL_SECONDS:
            return
        self._recalls_read = self._clock()
        for recall in self._grants.recalled():
            for request in list(self._by_id.values()):
                if request.reservation.target_pe == recall.pe and signal_of(request.reservation) == recall.signal:
                    self._drop(request)
                    request.result.set_exception(Aborted(f"request {request.request_id!r} was ended by its receiver"))
            try:
                self._grants.answer(recall)
            except TransportError:
                log.exception("PE %d waits on for the answer to its recall", recall.pe)

    def _stop_expired(self) -> None:
        for request in [request for request in self._by_id.values() if request.lease.is_over]:
            self.counters.expired_leases += 1
            self._drop(request)
            request.result.set_exception(
                LeaseExpired(f"no call waited for request {request.request_id!r} for {request.lease.seconds:g} s")
            )

    def _checked_map(self, token_ids: list[int], reservation: Reservation) -> PositionMap:
        self._grants.check(reservation)
        if not reservation.matched_tokens < len(token_ids):
            raise InvalidCall(
                f"matched_tokens is {reservation.matched_tokens} of a prompt of {len(token_ids)}; one must be left"
            )
        pages = self._pages_of(len(token_ids))
        if pages > self._cache.num_pages:
            raise InvalidCall(f"the prompt needs {pages} pages; this worker has {self._cache.num_pages}")
        return decode_map(
            reservation.wire_map,
            self._cache.layout,
            num_pages=self._transport.num_pages,
            expected_start=reservation.matched_tokens,
            expected_tokens=len(token_ids) - reservation.matched_tokens,
        )

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.layout.page_size)

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if self._cache.num_free_pages < self._pages_of(request.num_tokens):
                return
            self._waiting.popleft()
            self._begin(request)

    def _begin(self, request: PrefillRequest) -> None:
        cache, reservation = self._cache, request.reservation
        cache.add_sequence(request.sequence_id)
        if self._sharing:
            request.cached_tokens = request.computed = cache.match_prefix(request.sequence_id, request.token_ids)
        cache.reserve(request.sequence_id, request.num_tokens)
        cache.mark_send(request.sequence_id, reservation.matched_tokens, request.position_map, reservation.target_pe)
        request.started = time.perf_counter()
        self._running.append(request)

    def _next_chunks(self) -> list[tuple[PrefillRequest, int]]:
        budget, chunks = self._max_batch_tokens, []
        for request in self._running:
            length = min(budget, request.num_tokens - request.computed)
            chunks.append((request, length))
            budget -= length
            if budget == 0:
                break
        return chunks

    def _forward(self, chunks: list[tuple[PrefillRequest, int]]) -> None:
        cache, before = self._cache, (self._transport.bytes_written, self._meter.seconds)
        plan = cache.begin_forward(
            [request.sequence_id for request, _ in chunks],
            [length for _, length in chunks],
            [request.num_tokens for request, _ in chunks],
        )
        tokens, last_rows, ending = [], [], []
        for request, length in chunks:
            tokens += request.token_ids[request.computed : request.computed + length]
            request.computed += length
            if request.computed == request.num_tokens:
                last_rows.append(len(tokens) - 1)
                ending.append(request)
        logits = self._runner.forward(np.array(tokens, np.int64), plan, np.array(last_rows, np.int64))
        cache.end_forward(plan)
        samples = self._runner.sample(
            logits,
            SampleBatch.from_params([request.params for request in ending]),
            np.array([request.num_tokens for request in ending], np.int64),
        )
        self._land(chunks, *before)
        for row, request in enumerate(ending):
            self._end(request, int(samples.token_ids[row]), samples.logprobs[row])

    def _land(self, chunks: list[tuple[PrefillRequest, int]], bytes_before: int, seconds_before: float) -> None:
        """Waits until what this forward wrote is visible to its receivers, and shares out what that cost."""
        began = time.perf_counter()
        for pe in {request.reservation.target_pe for request, _ in chunks}:
            self._transport.quiet(pe)
        seconds = time.perf_counter() - began + self._meter.seconds - seconds_before
        written = self._transport.bytes_written - bytes_before
        for request, _ in chunks:
            total = self._cache.num_sent(request.sequence_id) * self._cache.layout.token_bytes
            if written:
                request.push_seconds += seconds * (total - request.bytes_pushed) / written
            request.bytes_pushed = total

    def _end(self, request: PrefillRequest, first_token: int, logprobs: TokenLogprobs | None) -> None:
        reservation = request.reservation
        landed = request.position_map.num_tokens
        digest = 0
        if self._verify:
            digest = digest_kv(self._cache, request.sequence_id, reservation.matched_tokens, request.num_tokens)
        self._transport.post(
            reservation.target_pe,
            reservation.signal_slot,
            pack_signal(reservation.generation, landed),
            pack_payload(first_token, digest),
        )
        if self._sharing:
            self._cache.publish_prefix(request.sequence_id, request.token_ids)
        self._drop(request)
        request.result.set_result(
            PrefillResult(
                first_token=first_token,
                logprobs=logprobs,
                cached_tokens=request.cached_tokens,
                queue_seconds=request.started - request.arrived,
                prefill_seconds=time.perf_counter() - request.started,
                push_seconds=request.push_seconds,
                bytes_pushed=request.bytes_pushed,
            )
        )

    def _fail(self, requests: list[PrefillRequest], error: Exception) -> None:
        for pe in {request.reservation.target_pe for request in requests}:
            self._transport.quiet(pe)
        for request in requests:
            if request.request_id in self._by_id:
                self._drop(request)
                request.result.set_exception(ForwardFailed(f"prefill of {request.request_id!r} failed: {error}"))

    def _drop(self, request: PrefillRequest) -> None:
        del self._by_id[request.request_id]
        self._results[request.request_id] = request.result
        while len(self._results) > RESULTS_REMEMBERED:
            self._results.popitem(last=False)
        if request in self._running:
            self._running.remove(request)
            self._cache.remove_sequence(request.sequence_id)
        else:
            self._waiting.remove(request)
