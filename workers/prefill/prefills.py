"""Prompts that this worker computes, and whose KV it pushes while it computes."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.workers.config import LoopSettings
from tandem.workers.errors import Aborted, ForwardFailed, InvalidCall
from tandem.workers.handoff.handoff import QUIET_POLL_SECONDS, RECALL_POLL_SECONDS, Handoff, settled
from tandem.workers.prefill.forwards import PromptForwards
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.prefill_request import PrefillRequest, PrefillResult
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import Batch
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.001


class Prefills:
    """Owned by the step thread; every method runs there.

    The Scheduler says what is computed, the Handoff what may be written. Only the end of a request waits for its
    writes: the next forward is launched while they are under way, and the signal is posted behind them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedKVCache,
        scheduler: Scheduler,
        handoff: Handoff,
        speculative: SpeculativePrefill,
        meter: PushMeter,
        ids: SequenceIds,
        settings: LoopSettings,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._handoff = handoff
        self._speculative = speculative
        self._forwards = PromptForwards(runner, cache, meter)
        self._ids = ids
        self._max_batch_tokens = settings.max_batch_tokens
        self._sharing = settings.sharing

    # Commands

    def speculate(self, request_id: str, token_ids: Int64Array, salt: bytes = b"") -> "Future[FirstToken] | None":
        """Prefills a prompt that submit() is to come for. abort() or its lease end it where no room is found for it.

        Launches its first forward where there is nothing else to do; its first token is in the future once it is
        sampled. One prompt at a time: another is not heeded, nor is one that has ended or came before: None.
        """
        if not self._handoff.is_new(request_id) or self._scheduler.num_waiting or self._scheduler.num_running:
            return None
        return self._speculative.take(request_id, token_ids, salt)

    def submit(
        self,
        request_id: str,
        token_ids: Sequence[int] | Int64Array,
        params: SamplingParams,
        reservation: Reservation,
        salt: bytes = b"",
    ) -> "Future[PrefillResult]":
        """Queues a prompt; the future ends when its first token is sampled and all its KV is at the receiver.

        A second call with the same request_id gets the first one's future. Raises InvalidCall, InvalidPositionMap,
        Aborted, StaleEpoch, StaleReservation. The lease runs until attend().
        """
        known = self._handoff.known(request_id)
        if known is not None:
            return known
        prompt = np.asarray(token_ids, np.int64)
        position_map = self._checked_map(prompt, reservation)
        lease = self._handoff.lease(reservation)
        sequence_id = self._ids.take()
        request = PrefillRequest(request_id, sequence_id, prompt, params, reservation, position_map, lease, salt=salt)
        self._handoff.begin(request)
        speculative = self._speculative.claim(request_id, prompt, salt)
        if speculative is not None:
            request.take_over(speculative)
        self._scheduler.add(request)
        return request.result

    def attend(self, request_id: str) -> Lease | None:
        """See Handoff.attend."""
        return self._handoff.attend(request_id)

    def abort(self, request_id: str) -> "Future[bool]":
        """Ends once this worker neither computes nor writes for the request; False when it was not here.

        WriterNotQuiet when that cannot be said in time; another abort asks again.
        """
        self._handoff.refuse(request_id)
        self._handoff.settle()
        if request_id == self._speculative.request_id:
            return settled(self._speculative.drop())
        request = self._handoff.find(request_id)
        if request is None:
            return settled(False)
        self._stop(request, Aborted(f"request {request_id!r} was aborted"))
        return self._handoff.when_quiet(request_id)

    def release(self, prefix: str) -> "list[Future[bool]]":
        """abort() for every request whose id begins with `prefix`, those that are yet to arrive included."""
        speculative = self._speculative.request_id
        known_ids = self._handoff.release(prefix)
        if speculative is not None and speculative.startswith(prefix):
            known_ids.append(speculative)
        return [self.abort(known) for known in known_ids]

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + (self._speculative.request_id is not None)

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running + self._handoff.num_draining

    # Steps

    def upkeep(self) -> None:
        """What comes before a batch: requests that end from outside, and waiting prompts for which there is room."""
        self._speculative.expire()
        self._handoff.upkeep(self._stop)
        for request in self._scheduler.admitted(self._has_room):
            self._attempt([request], lambda request=request: self._begin(request))

    def compute(self, batch: Batch) -> float:
        """Computes the batch's chunks; how long nothing is to be done behind them, in seconds."""
        self._attempt(batch.launched, lambda: self._send_launched(batch.launched))
        self._attempt([request for request, _ in batch.chunks], lambda: self._forward(batch))
        if self._scheduler.num_running or ((batch.chunks or batch.launched) and self._scheduler.num_waiting):
            return 0
        return DRAIN_POLL_SECONDS if self._handoff.num_draining else RECALL_POLL_SECONDS

    def _attempt(self, requests: Sequence[PrefillRequest], work: Callable[[], Sequence[PrefillRequest]]) -> None:
        """Does what brings `requests` on, and waits for those that it ends."""
        if not requests:
            return
        try:
            self._handoff.await_quiet(work())
        except Exception as error:
            log.exception("a prefill forward failed")
            for request in requests:
                if self._scheduler.is_running(request):
                    self._drain(request, ForwardFailed(f"prefill of {request.request_id!r} failed: {error}"))

    def _checked_map(self, token_ids: Int64Array, reservation: Reservation) -> PositionMap:
        position_map = self._handoff.check(reservation, len(token_ids))
        shortage = self._cache.shortage(len(token_ids), self._max_batch_tokens)
        if shortage is not None:
            raise InvalidCall(f"the prompt needs {shortage[0]} pages; this worker has {shortage[1]}")
        return position_map

    def _has_room(self, request: PrefillRequest) -> bool:
        """Whether there are pages for a prompt; a speculative one gives way."""
        while not self._cache.has_room(request.num_tokens, self._max_batch_tokens):
            if not self._speculative.drop():
                return False
        return True

    def _begin(self, request: PrefillRequest) -> Sequence[PrefillRequest]:
        cache = self._cache
        cache.add_sequence(request.sequence_id)
        if self._sharing:
            matched = cache.match_prefix(request.sequence_id, request.token_ids, request.salt)
            request.cached_tokens = request.computed = matched
        cache.reserve(request.sequence_id, request.num_tokens, self._max_batch_tokens)
        request.started = time.perf_counter()
        return ()  # none ends with it

    def _forward(self, batch: Batch) -> Sequence[PrefillRequest]:
        """One chunk of each request; those that have come to their end."""
        ending, logits = self._forwards.launch(batch.chunks, alone=batch.alone)
        if ending:
            self._finish(ending, logits)
        return ending

    def _send_launched(self, requests: Sequence[PrefillRequest]) -> Sequence[PrefillRequest]:
        """Prompts that were launched as a whole before their receiver was known; they have come to their end."""
        for request in requests:
            assert request.logits is not None
            self._forwards.send_launched(request)
            self._finish([request], request.logits)
        return requests

    def _finish(self, requests: Sequence[PrefillRequest], logits: Tensor) -> None:
        """Samples the first tokens of requests of which all is computed and sent. Waits for the device.

        The signals are queued behind the sampling, before the host waits for it.
        """
        if self._sharing:  # while the device computes: a reader of these pages is launched after it
            for request in requests:
                self._cache.publish_prefix(request.sequence_id, request.token_ids, request.salt)
        tokens, pending = self._runner.sample_async(
            logits,
            SampleBatch.from_params([request.params for request in requests]),
            np.array([request.num_tokens for request in requests], np.int64),
        )
        for row, request in enumerate(requests):
            self._handoff.post(request, tokens[row])
        while self._handoff.num_draining and not pending.is_done():  # their callers should not wait for this forward
            self._handoff.settle()
            time.sleep(QUIET_POLL_SECONDS)
        samples = pending.wait()
        for row, request in enumerate(requests):
            request.sampled_at = time.perf_counter()
            request.first_token.set_result(FirstToken(int(samples.token_ids[row]), samples.logprobs[row]))
            self._drain(request, None)

    def _stop(self, request: PrefillRequest, error: Exception) -> None:
        """Nothing more is computed for the request; its caller hears `error` once its writes are quiet."""
        if self._scheduler.is_waiting(request):
            self._scheduler.remove(request)
            self._handoff.end(request, error)
        elif self._scheduler.is_running(request):
            self._drain(request, error)

    def _drain(self, request: PrefillRequest, error: Exception | None) -> None:
        self._scheduler.remove(request)
        self._handoff.drain(request, error)
