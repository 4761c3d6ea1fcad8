"""The step loop of a decode worker: reservations, landing, one token a step for every running sequence."""

import logging
import time
from collections.abc import Sequence

import numpy as np

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.transfer.transport import Transport
from tandem.workers.counters import Counters
from tandem.workers.decode.batch import DecodeBatch, DecodeRequest, Flight
from tandem.workers.decode.core_share import CoreShare
from tandem.workers.decode.reservations import Reservations, landed_tokens
from tandem.workers.decode.token_stream import StreamFanout, StreamUpdate, TokenStream
from tandem.workers.errors import CorruptKV, ForwardFailed
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.finish import FinishReason, FinishRule
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.lease import Clock
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)

LANDING_POLL_SECONDS = 0.0003
IDLE_POLL_SECONDS = 0.00003  # of a landing where a device computes, and leaves this thread a core of its own
STEP_POLL_SECONDS = 0.0001
# While a step computes, so that the event loop has the interpreter for the last one's tokens.
DELIVERY_SECONDS = 0.00001


class DecodeLoop:
    """Owned by the step thread; every method runs there.

    A request is in _reservations from PrepareReceive to its last token, in _landing from StartGenerate until its KV
    is there, and in _batch while it is stepped.

    Where the runner runs ahead, a step, _flight, is launched before the tokens of the one before it, _reading, are
    read. Who stops at one of those has a row too many in the step launched since: it is ignored, and the pages are
    released when that step is done. Nobody waits for a device here, so that a reservation, say, is made while a step
    computes.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedKVCache,
        transport: Transport,
        fanout: StreamFanout,
        cores: CoreShare,
        *,
        eos_token_ids: tuple[int, ...],
        max_sequences: int,
        sharing: bool,
        verify: bool = False,
        lease_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._fanout = fanout
        self._cores = cores
        self._eos_token_ids = eos_token_ids
        self._sharing = sharing
        self.counters = Counters()
        self._reservations = Reservations(
            cache,
            transport,
            self.counters,
            max_sequences=max_sequences,
            sharing=sharing,
            verify=verify,
            lease_seconds=lease_seconds,
            clock=clock,
        )
        self._landing: list[DecodeRequest] = []
        self._batch = DecodeBatch()
        self._flight: Flight | None = None
        self._reading: Flight | None = None
        self._unpublished: list[DecodeRequest] = []

    # Commands

    def prepare(
        self, request_id: str, token_ids: Sequence[int] | Int64Array, max_tokens: int, writer_pe: int
    ) -> Reservation:
        """See Reservations.prepare."""
        return self._reservations.prepare(request_id, np.asarray(token_ids, np.int64), max_tokens, writer_pe)

    def start(self, request_id: str, reservation_id: int, params: SamplingParams, stream: TokenStream) -> None:
        """Tokens of a reserved request go to `stream`, once its KV has landed."""
        request = self._reservations.start(request_id, reservation_id, params.max_tokens)
        request.params = params
        request.rule = FinishRule.of(params, self._eos_token_ids)
        request.stream = stream
        self._landing.append(request)
        if self._runner.runs_ahead and len(self._reservations) == 1:  # there is time
            first = np.array([len(request.prompt) + 1])
            self._runner.foresee((request.sequence_id,), SampleBatch.from_params([params]), first)

    def abort(self, request_id: str, writer_quiet: bool) -> bool:
        """Ends a request; its pages return now if no write can come any more, else they drain. Idempotent."""
        request = self._reservations.get(request_id)
        if request is None:
            return writer_quiet and self._reservations.settle_draining(request_id)
        self._batch.leave([request])
        self._leave(request, writer_quiet)
        if request.stream is not None:
            self._fanout.publish([StreamUpdate(request.stream, None, None, FinishReason.ABORT)])
        return True

    def release(self, prefix: str, writer_quiet: bool) -> None:
        """abort() for every request whose id begins with `prefix`: draining ones too, and those yet to arrive."""
        self._reservations.refuse(prefix)
        for request_id in [known for known in self._reservations.request_ids() if known.startswith(prefix)]:
            self.abort(request_id, writer_quiet)

    @property
    def num_waiting(self) -> int:
        return len(self._reservations) - len(self._batch)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    # Steps

    def step(self) -> float | None:
        if self._reading is None:
            reap_again = self._reservations.reap()
            if self._landing:
                self._take_landed()
            self._cores.take(alone=self.num_waiting == 0)
            if not len(self._batch) and self._flight is None:
                poll = IDLE_POLL_SECONDS if self._runner.runs_ahead else LANDING_POLL_SECONDS
                return poll if self._landing else reap_again
        try:
            return self._forward()
        except Exception as error:
            log.exception("a decode forward failed")
            self._fail_batch(error)
            return 0

    def _take_landed(self) -> None:
        """Moves every started request whose KV has landed into the batch."""
        mailbox = self._reservations.mailbox()
        landed = landed_tokens(mailbox, self._landing).tolist()
        complete = [
            request for request, tokens in zip(self._landing, landed, strict=True) if tokens >= request.expected_tokens
        ]
        joining, updates = [], []
        for request in complete:
            assert request.stream is not None
            self._landing.remove(request)
            try:
                reason = self._land(request, mailbox)
            except Exception as error:
                if not isinstance(error, CorruptKV):
                    log.exception("a landing failed")
                    error = ForwardFailed(f"landing of {request.request_id!r} failed: {error}")
                self._fanout.fail(request.stream, error)
                self._leave(request, writer_quiet=True)
                continue
            if reason == FinishReason.RUNNING:
                joining.append(request)
            else:
                updates.append(StreamUpdate(request.stream, None, None, reason))
                self._leave(request, writer_quiet=True)
        if joining:
            self._join(joining)
        self._fanout.publish(updates)

    def _join(self, requests: list[DecodeRequest]) -> None:
        """Into the batch. Of one that is alone a step that was foreseen is launched before all else."""
        pending = None
        if len(requests) == 1 and not len(self._batch) and self._flight is None:
            try:
                tokens = np.array(requests[0].output, np.int64)
                pending = self._runner.step_foreseen((requests[0].sequence_id,), tokens)
            except Exception as error:
                log.exception("a decode forward failed")
                return self._fail_batch(error)
        self._batch.join(requests)
        self._unpublished += requests
        if pending is not None:
            self._flight = self._batch.launched(pending)

    def _land(self, request: DecodeRequest, mailbox: Int64Array) -> FinishReason:
        """Takes the first token. A prompt that ends with it can be shared, and will not be stepped."""
        assert request.rule is not None
        request.output.append(self._reservations.land(request, mailbox))
        reason = request.rule.reason(request.output[0], 1)
        if reason != FinishReason.RUNNING:
            self._publish_prompts([request])
        return reason

    def _forward(self) -> float:
        """Launches a step, unless one is still to be read, and reads one that is done; see StepLoop.step."""
        if self._reading is None:
            flight = self._launch() if len(self._batch) else None
            self._publish_prompts(self._unpublished)  # after the launch, for nobody's next token waits for it
            self._unpublished = []
            if self._runner.runs_ahead:
                flight, self._flight = self._flight, flight
            self._reading = flight
        if self._reading is not None:
            if not self._reading.pending.is_done():
                return STEP_POLL_SECONDS
            flight, self._reading = self._reading, None
            self._deliver(flight)
            if self._flight is not None:
                return DELIVERY_SECONDS
        return 0

    def _launch(self) -> Flight:
        batch = self._batch
        return batch.launched(
            self._runner.step(batch.sequence_ids, batch.tokens, batch.sources, batch.sampling, batch.lengths + 1)
        )

    def _publish_prompts(self, requests: list[DecodeRequest]) -> None:
        """Lets others share the prompts of requests that have landed."""
        for request in requests if self._sharing else []:
            if not request.left:
                self._cache.publish_prefix(request.sequence_id, request.prompt)

    def _deliver(self, flight: Flight) -> None:
        """Hands out the tokens of a step."""
        try:
            samples = flight.pending.wait()
        finally:
            self._release(flight.released)
        if not self._runner.runs_ahead:
            self._batch.learn(samples.token_ids)
        reasons = flight.reasons(samples.token_ids).tolist()
        updates, leaving = [], []
        for request, token, logprob, reason in zip(
            flight.requests, samples.token_ids.tolist(), samples.logprobs, reasons, strict=True
        ):
            if request.left:
                continue
            request.output.append(token)
            assert request.stream is not None
            updates.append(StreamUpdate(request.stream, token, logprob, FinishReason(reason)))
            if reason != FinishReason.RUNNING:
                leaving.append(request)
        if leaving:
            self._batch.leave(leaving)
            for request in leaving:
                self._leave(request, writer_quiet=True)
        self._fanout.publish(updates)

    def _fail_batch(self, error: Exception) -> None:
        """Ends every request that has a token on its way, also those whose last one a step before was to bring."""
        flights = [flight for flight in (self._reading, self._flight) if flight is not None]
        self._reading = self._flight = None
        try:
            self._runner.drain()  # what was launched may still write to their pages
        except Exception:
            log.exception("the step in flight failed, too")
        for flight in flights:
            self._release(flight.released)
        requests = self._reservations.landed()
        self._batch.leave(requests)
        for request in requests:
            if request.stream is not None:
                failure = ForwardFailed(f"decode of {request.request_id!r} failed: {error}")
                self._fanout.fail(request.stream, failure)
            request.output.clear()
            self._leave(request, writer_quiet=True)

    # Leaving

    def _leave(self, request: DecodeRequest, writer_quiet: bool) -> None:
        if self._sharing and request.landed and len(request.output) > 1:
            self._cache.publish_prefix(request.sequence_id, np.concatenate((request.prompt, request.output[:-1])))
        for flight in (self._flight, self._reading):  # the later one first
            if flight is not None and request in flight.requests:
                flight.released.append(request.sequence_id)
                break
        else:
            self._release([request.sequence_id])
        request.left = True
        self._reservations.end(request, writer_quiet)
        if request in self._landing:
            self._landing.remove(request)

    def _release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self._cache.remove_sequence(sequence_id)
