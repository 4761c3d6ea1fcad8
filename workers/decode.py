"""The step loop of a decode worker: reservations, landing, one token a step for every running sequence."""

import logging

import numpy as np

from tandem.cache.errors import OutOfPages
from tandem.cache.paged_cache import PagedKVCache
from tandem.transfer.completion import SignalBoard
from tandem.transfer.errors import NoFreeSignal
from tandem.transfer.transport import Int64Array, Transport
from tandem.transfer.wire_map import encode_map
from tandem.workers.core_share import CoreShare
from tandem.workers.decode_batch import DecodeBatch, DecodeRequest, Flight
from tandem.workers.errors import InvalidCall, NoRoom
from tandem.workers.finish import FinishReason, FinishRule
from tandem.workers.model_runner import ModelRunner
from tandem.workers.reservation import Reservation
from tandem.workers.sampling_params import SamplingParams
from tandem.workers.token_stream import StreamFanout, StreamUpdate, TokenStream

log = logging.getLogger(__name__)

LANDING_POLL_SECONDS = 0.0003
LONGEST_APPEND = 2  # tokens of one sequence in forwards not known to be done: the next step, and the one in flight


class DecodeLoop:
    """Owned by the step thread; every method runs there.

    A request is in _requests from its reservation to its last token, and in _batch while it is stepped. One that is
    cancelled before its sender is known to be quiet leaves _requests for _draining: its pages stay out of use until
    abort(writer_quiet=True) says that no write can hit them any more.

    Where the runner runs ahead, a step is launched before the tokens of the one before it, _flight, are read. Who stops
    at one of those has a row too many in the step launched since: it is ignored, and the pages are released when that
    step is done.
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
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._transport = transport
        self._fanout = fanout
        self._cores = cores
        self._eos_token_ids = eos_token_ids
        self._max_sequences = max_sequences
        self._sharing = sharing
        self._signals = SignalBoard(transport.num_signals)
        self._requests: dict[str, DecodeRequest] = {}
        self._reservations: dict[str, Reservation] = {}
        self._released: tuple[str, ...] = ()  # prefixes, one for each gateway that was lost
        self._draining: dict[str, DecodeRequest] = {}
        self._landing: list[DecodeRequest] = []
        self._batch = DecodeBatch()
        self._flight: Flight | None = None
        self._next_sequence = 1

    # Commands

    def prepare(self, request_id: str, token_ids: list[int], max_tokens: int) -> Reservation:
        """Sets pages aside for the prompt and its growth. Idempotent by request_id. NoRoom leaves nothing behind."""
        if request_id in self._reservations:
            return self._reservations[request_id]
        if request_id in self._draining or request_id.startswith(self._released):
            raise InvalidCall(f"request {request_id!r} was aborted")
        capacity = len(token_ids) + max_tokens - 1  # the last token is never fed back
        pages = max(self._cache.num_pages_needed(capacity, LONGEST_APPEND))
        if not self._cache.has_room(capacity, LONGEST_APPEND, ever=True):
            raise InvalidCall(
                f"prompt and max_tokens need {pages} pages; this worker has {self._cache.num_pages} "
                f"of {self._cache.layout.page_size} tokens"
            )
        if len(self._requests) + len(self._draining) >= self._max_sequences:
            raise NoRoom(f"all {self._max_sequences} places for sequences are taken")
        request = self._reserve(request_id, token_ids, capacity)
        reservation = self._offer(request, pages)
        self._requests[request_id] = request
        self._reservations[request_id] = reservation
        return reservation

    def start(self, request_id: str, reservation_id: int, params: SamplingParams, stream: TokenStream) -> None:
        """Tokens of a reserved request go to `stream`, once its KV has landed."""
        request = self._requests.get(request_id)
        if request is None or request.sequence_id != reservation_id:
            raise InvalidCall(f"reservation {reservation_id} of request {request_id!r} is not held here")
        if request.stream is not None:
            raise InvalidCall(f"request {request_id!r} has a stream already")
        request.params = params
        request.rule = FinishRule.of(params, self._eos_token_ids)
        request.stream = stream
        self._landing.append(request)

    def abort(self, request_id: str, writer_quiet: bool) -> bool:
        """Ends a request; its pages return now if no write can come any more, else they drain. Idempotent."""
        request = self._requests.get(request_id)
        if request is not None:
            self._batch.leave([request])
            self._leave(request, settled=writer_quiet or self._has_landed(request))
            if request.stream is not None:
                update = StreamUpdate(request.stream, None, None, FinishReason.ABORT)
                self._fanout.publish([update])
            return True
        draining = self._draining.pop(request_id, None) if writer_quiet else None
        if draining is not None:
            self._settle(draining)
        return draining is not None

    def release(self, prefix: str, writer_quiet: bool) -> None:
        """abort() for every request whose id begins with `prefix`: draining ones too, and those yet to arrive."""
        self._released = (*self._released, prefix)
        for request_id in [known for known in (*self._requests, *self._draining) if known.startswith(prefix)]:
            self.abort(request_id, writer_quiet)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._batch)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    # Steps

    def step(self) -> float | None:
        if self._landing:
            self._take_landed()
        self._cores.take(alone=self.num_waiting == 0)
        if len(self._batch) or self._flight is not None:
            try:
                self._forward()
            except Exception as error:
                log.exception("a decode forward failed")
                self._fail_batch(error)
            return 0
        return LANDING_POLL_SECONDS if self._landing else None

    def _reserve(self, request_id: str, token_ids: list[int], capacity: int) -> DecodeRequest:
        cache, sequence_id = self._cache, self._next_sequence
        cache.add_sequence(sequence_id)
        try:
            matched = cache.match_prefix(sequence_id, token_ids) if self._sharing else 0
            cache.reserve(sequence_id, capacity, LONGEST_APPEND)
            signal = self._signals.acquire()
        except (OutOfPages, NoFreeSignal) as error:
            cache.remove_sequence(sequence_id)
            raise NoRoom(f"no room for request {request_id!r}: {error}") from error
        self._next_sequence += 1
        return DecodeRequest(
            request_id=request_id,
            sequence_id=sequence_id,
            prompt=token_ids,
            signal=signal,
            expected_tokens=len(token_ids) - matched,
        )

    def _offer(self, request: DecodeRequest, pages: int) -> Reservation:
        return Reservation(
            reservation_id=request.sequence_id,
            epoch=self._transport.epoch,
            target_pe=self._transport.pe,
            signal_slot=request.signal.slot,
            generation=request.signal.generation,
            matched_tokens=len(request.prompt) - request.expected_tokens,
            wire_map=encode_map(
                self._cache.prepare_receive(request.sequence_id, request.expected_tokens), self._cache.layout
            ),
            pages=pages,
        )

    def _take_landed(self) -> None:
        """Moves every started request whose KV has landed into the batch."""
        mailbox = self._transport.mailbox()
        waiting = self._landing
        landed = _landed_tokens(mailbox, waiting)
        joining, updates = [], []
        self._landing = []
        for request, tokens in zip(waiting, landed.tolist(), strict=True):
            if tokens < request.expected_tokens:
                self._landing.append(request)
                continue
            self._mark_landed(request)
            request.output.append(int(mailbox[request.signal.slot, 1]))
            assert request.rule is not None
            assert request.stream is not None
            reason = request.rule.reason(request.output[0], 1)
            if reason == FinishReason.RUNNING:
                joining.append(request)
            else:
                updates.append(StreamUpdate(request.stream, None, None, reason))
                self._leave(request, settled=True)
        if joining:
            self._batch.join(joining)
        self._fanout.publish(updates)

    def _mark_landed(self, request: DecodeRequest) -> None:
        request.landed = True
        self._cache.finish_receive(request.sequence_id)
        self._signals.release(request.signal)
        if self._sharing:
            self._cache.publish_prefix(request.sequence_id, request.prompt)

    def _forward(self) -> None:
        flight = self._launch() if len(self._batch) else None
        if self._runner.runs_ahead:
            flight, self._flight = self._flight, flight
        if flight is not None:
            self._deliver(flight)

    def _launch(self) -> Flight:
        batch = self._batch
        return batch.launched(
            self._runner.step(batch.sequence_ids, batch.tokens, batch.sources, batch.sampling, batch.lengths + 1)
        )

    def _deliver(self, flight: Flight) -> None:
        """Waits for the tokens of a step and hands them out."""
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
                self._leave(request, settled=True)
        self._fanout.publish(updates)

    def _fail_batch(self, error: Exception) -> None:
        """Ends every request that has a token on its way, also those whose last one a step before was to bring."""
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                flight.pending.wait()  # it may still write to their pages
            except Exception:
                log.exception("the step in flight failed, too")
            self._release(flight.released)
        requests = [request for request in self._requests.values() if request.landed]
        self._batch.leave(requests)
        for request in requests:
            if request.stream is not None:
                self._fanout.fail(request.stream, f"decode of {request.request_id!r} failed: {error}")
            request.output.clear()
            self._leave(request, settled=True)

    # Leaving

    def _has_landed(self, request: DecodeRequest) -> bool:
        """The signal comes after quiet: once it is there, the sender writes no more."""
        if request.landed:
            return True
        return int(_landed_tokens(self._transport.mailbox(), [request])[0]) >= request.expected_tokens

    def _leave(self, request: DecodeRequest, settled: bool) -> None:
        if self._sharing and request.landed and len(request.output) > 1:
            self._cache.publish_prefix(request.sequence_id, request.prompt + request.output[:-1])
        if self._flight is not None and request in self._flight.requests:
            self._flight.released.append(request.sequence_id)
        else:
            self._release([request.sequence_id])
        request.left = True
        del self._requests[request.request_id]
        del self._reservations[request.request_id]
        if request in self._landing:
            self._landing.remove(request)
        if settled:
            self._settle(request)
        else:
            self._draining[request.request_id] = request

    def _release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self._cache.remove_sequence(sequence_id)

    def _settle(self, request: DecodeRequest) -> None:
        """No write for this request can come any more."""
        if not request.landed:
            request.landed = True
            self._cache.finish_receive(request.sequence_id)
            self._signals.release(request.signal)


def _landed_tokens(mailbox: Int64Array, requests: list[DecodeRequest]) -> Int64Array:
    slots = np.array([request.signal.slot for request in requests], np.int64)
    generations = np.array([request.signal.generation for request in requests], np.int64)
    return SignalBoard.landed(mailbox, slots, generations)
