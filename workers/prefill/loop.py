"""The step loop of a prefill worker: chunks of prompts, several requests in one forward, KV pushed while computing."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from torch import Tensor

from tandem.cache.digest import digest_kv
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.completion import pack_payload, pack_signal
from tandem.transfer.errors import TransportError
from tandem.transfer.recall import Recall
from tandem.transfer.transport import Transport
from tandem.workers.counters import Counters
from tandem.workers.errors import Aborted, ForwardFailed, InvalidCall, LeaseExpired
from tandem.workers.prefill.completion import Landing
from tandem.workers.prefill.ended_requests import EndedRequests
from tandem.workers.prefill.first_token import FirstToken
from tandem.workers.prefill.forwards import Chunks, PromptForwards
from tandem.workers.prefill.grants import Grants, signal_of
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.prefill.request import PrefillRequest, PrefillResult
from tandem.workers.prefill.speculative_prefill import HeadStart
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.lease import Clock, Lease
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)

RECALL_POLL_SECONDS = 0.02
LEASE_SHARE = 0.8  # the writer stops before the receiver's own lease is over
# A push is nearly always through when its last token is sampled: its answer should not wait for another's forward.
PATIENCE_SECONDS = 0.002
QUIET_POLL_SECONDS = 0.00002  # meanwhile the event loop has the interpreter, for the first token
POLL_SECONDS = 0.001


class PrefillLoop:
    """Owned by the step thread; every method runs there. First come, first served, within a budget of tokens.

    A request waits, runs, and lands: then all its forwards are launched, and its pages stay until its writes are quiet.
    Only that waits for writes: the next forward is launched while they are under way, and the signal is posted behind
    them. However a request ends, it lands; a receiver that recalls it is answered once it has.
    """

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
        lease_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """verify: whether a digest of what was sent goes with the signal, for the receiver to compare. lease_seconds:
        how long an announced prompt is kept."""
        self._runner = runner
        self._cache = cache
        self._transport = transport
        self._forwards = PromptForwards(runner, cache, meter)
        self._max_batch_tokens = max_batch_tokens
        self._sharing = sharing
        self._verify = verify
        self._clock = clock
        self.counters = Counters()
        self._grants = Grants(transport, self.counters)
        kept = lease_seconds * LEASE_SHARE
        self._head_start = HeadStart(
            runner, cache, max_batch_tokens=max_batch_tokens, sharing=sharing, lease_seconds=kept, clock=clock
        )
        self._recalls_read = -RECALL_POLL_SECONDS
        self._waiting: deque[PrefillRequest] = deque()
        self._running: list[PrefillRequest] = []
        self._landing: dict[str, Landing] = {}
        self._by_id: dict[str, PrefillRequest] = {}
        self._ended = EndedRequests()
        self._next_sequence = 1

    # Commands

    def announce(self, request_id: str, token_ids: Int64Array) -> "Future[FirstToken] | None":
        """A prompt that submit() is to come for, unless its room is not found: abort() then ends it, or its lease.

        Its first forward is launched where there is nothing else to do, and its first token told when it is drawn. One
        prompt at a time: others are not heeded, nor is one that has ended or came before: None.
        """
        ended = self._ended.is_aborted(request_id) or self._ended.result(request_id) is not None
        if ended or request_id in self._by_id or self._waiting or self._running:
            return None
        sequence_id, self._next_sequence = self._next_sequence, self._next_sequence + 1
        return self._head_start.take(request_id, sequence_id, token_ids)

    def submit(
        self,
        request_id: str,
        token_ids: Sequence[int] | Int64Array,
        params: SamplingParams,
        reservation: Reservation,
    ) -> "Future[PrefillResult]":
        """Queues a prompt; the future ends when its first token is sampled and all its KV has landed.

        A second call with the same request_id gets the first one's future. Raises InvalidCall, InvalidPositionMap,
        Aborted, StaleEpoch, StaleReservation. The lease runs until attend().
        """
        if self._ended.is_aborted(request_id):
            raise Aborted(f"request {request_id!r} was aborted before it arrived")
        if request_id in self._by_id:
            return self._by_id[request_id].result
        result = self._ended.result(request_id)
        if result is not None:
            return result
        prompt = np.asarray(token_ids, np.int64)
        position_map = self._checked_map(prompt, reservation)
        self._grants.take(reservation)
        lease = Lease(reservation.lease_seconds * LEASE_SHARE, self._clock)
        request = PrefillRequest(request_id, self._next_sequence, prompt, params, reservation, position_map, lease)
        self._next_sequence += 1
        self._by_id[request_id] = request
        head = self._head_start.claim(request_id, prompt)
        if head is None:
            self._waiting.append(request)
        else:
            request.take_over(head)
            self._running.append(request)
        return request.result

    def attend(self, request_id: str) -> Lease | None:
        """The lease of a request, which does not run until the caller leaves it; None when the request has ended."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        request.lease.attend()
        return request.lease

    def abort(self, request_id: str) -> "Future[bool]":
        """Ends once this worker neither computes nor writes for the request; False when it was not here.

        WriterNotQuiet when that cannot be said in time; another abort asks again.
        """
        self._ended.abort(request_id)
        self._settle()
        if request_id == self._head_start.request_id:
            return _done(self._head_start.drop())
        request = self._by_id.get(request_id)
        if request is None:
            return _done(False)
        self._stop(request, Aborted(f"request {request_id!r} was aborted"))
        return self._landing[request_id].abort() if request_id in self._landing else _done(True)

    def release(self, prefix: str) -> "list[Future[bool]]":
        """abort() for every request whose id begins with `prefix`, those that are yet to arrive included."""
        self._ended.release(prefix)
        announced = self._head_start.request_id
        known_ids = [*self._by_id, *([] if announced is None else [announced])]
        return [self.abort(known) for known in known_ids if known.startswith(prefix)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (self._head_start.request_id is not None)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._landing)

    # Steps

    def step(self) -> float | None:
        self._heed_recalls()
        self._stop_expired()
        self._settle()
        self._admit()
        heads = [request for request in self._running if request.logits is not None]
        self._attempt(heads, lambda: self._send_heads(heads))
        chunks = self._next_chunks()
        self._attempt([request for request, _ in chunks], lambda: self._forward(chunks))
        if self._running or ((chunks or heads) and self._waiting):
            return 0
        return POLL_SECONDS if self._landing else RECALL_POLL_SECONDS

    def _attempt(self, requests: Sequence[PrefillRequest], work: Callable[[], list[PrefillRequest]]) -> None:
        """Does what brings `requests` on, and waits for those that it ends."""
        if not requests:
            return
        try:
            self._await_landing(work())
        except Exception as error:
            log.exception("a prefill forward failed")
            for request in requests:
                if request in self._running:
                    self._land(request, ForwardFailed(f"prefill of {request.request_id!r} failed: {error}"))

    def _heed_recalls(self) -> None:
        """Stops what receivers want back, and tells them once nothing of it is in flight any more."""
        if self._clock() - self._recalls_read < RECALL_POLL_SECONDS:
            return
        self._recalls_read = self._clock()
        recalls = self._grants.recalled()
        for recall in recalls:
            for request in self._recalled(recall):
                self._stop(request, Aborted(f"request {request.request_id!r} was ended by its receiver"))
        if recalls:
            self._settle()
        for recall in recalls:
            if self._recalled(recall):
                continue  # it lands: the recall stays unanswered, and is read again
            try:
                self._grants.answer(recall)
            except TransportError:
                log.exception("PE %d waits on for the answer to its recall", recall.pe)

    def _recalled(self, recall: Recall) -> list[PrefillRequest]:
        """Those of that use of the receiver's slot whose writes are not known to be quiet."""
        return [
            request
            for request in self._by_id.values()
            if request.reservation.target_pe == recall.pe and signal_of(request.reservation) == recall.signal
        ]

    def _stop_expired(self) -> None:
        self._head_start.expire()
        unfinished = [*self._waiting, *self._running]  # whoever lands only waits for what it has written
        for request in [request for request in unfinished if request.lease.is_over]:
            self.counters.expired_leases += 1
            reason = f"no call waited for request {request.request_id!r} for {request.lease.seconds:g} s"
            self._stop(request, LeaseExpired(reason))

    def _checked_map(self, token_ids: Int64Array, reservation: Reservation) -> PositionMap:
        position_map = self._grants.check(reservation, len(token_ids))
        shortage = self._cache.shortage(len(token_ids), self._max_batch_tokens)
        if shortage is not None:
            raise InvalidCall(f"the prompt needs {shortage[0]} pages; this worker has {shortage[1]}")
        return position_map

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            if not self._cache.has_room(request.num_tokens, self._max_batch_tokens):
                if not self._head_start.drop():
                    return
                continue
            self._running.append(self._waiting.popleft())
            self._attempt([request], partial(self._begin, request))

    def _begin(self, request: PrefillRequest) -> list[PrefillRequest]:
        cache = self._cache
        cache.add_sequence(request.sequence_id)
        if self._sharing:
            request.cached_tokens = request.computed = cache.match_prefix(request.sequence_id, request.token_ids)
        cache.reserve(request.sequence_id, request.num_tokens, self._max_batch_tokens)
        request.started = time.perf_counter()
        return []  # nobody ends with it

    def _next_chunks(self) -> Chunks:
        budget, chunks = self._max_batch_tokens, []
        for request in [request for request in self._running if request.logits is None]:
            length = min(budget, request.num_tokens - request.computed)
            chunks.append((request, length))
            budget -= length
            if budget == 0:
                break
        return chunks

    def _forward(self, chunks: Chunks) -> list[PrefillRequest]:
        """One chunk of each request; those that have come to their end."""
        alone = len(self._running) == 1 and not self._waiting
        ending, logits = self._forwards.launch(chunks, alone=alone)
        if ending:
            self._finish(ending, logits)
        return ending

    def _send_heads(self, heads: list[PrefillRequest]) -> list[PrefillRequest]:
        """Prompts that were launched as a whole before it was known where to; they have come to their end."""
        for request in heads:
            assert request.logits is not None
            self._forwards.send_head(request)
            self._finish([request], request.logits)
        return heads

    def _finish(self, requests: list[PrefillRequest], logits: Tensor) -> None:
        """Draws the first tokens of requests of which all is computed and sent, and has them posted as soon as they
        are drawn. Waits for the device."""
        if self._sharing:  # while the device computes: whoever reads these pages comes after it
            for request in requests:
                self._cache.publish_prefix(request.sequence_id, request.token_ids)
        tokens, pending = self._runner.draw(
            logits,
            SampleBatch.from_params([request.params for request in requests]),
            np.array([request.num_tokens for request in requests], np.int64),
        )
        for row, request in enumerate(requests):
            self._post(request, tokens[row])
        while self._landing and not pending.is_done():  # who waits for a landing should not wait for this forward
            self._settle()
            time.sleep(QUIET_POLL_SECONDS)
        samples = pending.wait()
        for row, request in enumerate(requests):
            request.sampled = time.perf_counter()
            request.drawn.set_result(FirstToken(int(samples.token_ids[row]), samples.logprobs[row]))
            self._land(request, None)

    def _post(self, request: PrefillRequest, token: Tensor) -> None:
        """Behind all writes for the request. token: int64 [], on the device; with a digest the host waits for it."""
        reservation, payload = request.reservation, token
        if self._verify:
            digest = digest_kv(self._cache, request.sequence_id, reservation.matched_tokens, request.num_tokens)
            payload = pack_payload(int(token), digest)
        self._transport.post(
            reservation.target_pe,
            reservation.signal_slot,
            pack_signal(reservation.generation, request.position_map.num_tokens),
            payload,
        )

    def _stop(self, request: PrefillRequest, error: Exception) -> None:
        """Nothing more is computed for the request; whoever waits for it hears `error` once its writes are quiet."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._forget(request)
            request.result.set_exception(error)
        elif request in self._running:
            self._land(request, error)

    def _land(self, request: PrefillRequest, error: Exception | None) -> None:
        """No forward will have this request any more; error: why it has no result."""
        self._running.remove(request)
        self._landing[request.request_id] = Landing(self._transport, request, error, self._clock)

    def _settle(self) -> None:
        """Lets go of the requests whose writes are quiet by now."""
        for request_id, landing in list(self._landing.items()):
            if landing.is_quiet():
                del self._landing[request_id]
                self._forget(landing.request)
                self._cache.remove_sequence(landing.request.sequence_id)
                landing.finish()

    def _forget(self, request: PrefillRequest) -> None:
        """It writes no more and holds no page here; a call that comes again finds its result."""
        del self._by_id[request.request_id]
        self._ended.add(request)

    def _await_landing(self, ended: Sequence[PrefillRequest]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        self._settle()
        while any(request.request_id in self._landing for request in ended) and time.monotonic() < until:
            time.sleep(QUIET_POLL_SECONDS)
            self._settle()


def _done(known: bool) -> "Future[bool]":
    answer: Future[bool] = Future()
    answer.set_result(known)
    return answer
