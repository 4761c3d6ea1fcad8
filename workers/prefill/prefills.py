"""Prompts that this worker computes: for peers, to which it pushes their KV meanwhile, or for itself."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.errors import PeerGone
from tandem.workers.config import LoopSettings
from tandem.workers.engine.admission import Admission, MostBytes, any_number
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import Aborted, InvalidCall, LogitsNotFinite, WorkerError, forward_failed
from tandem.workers.handoff.handoff import QUIET_POLL_SECONDS, RECALL_POLL_SECONDS, Handoff, settled
from tandem.workers.handoff.retired import IsPast, RetiredSequences
from tandem.workers.handoff.slot_turns import SlotTurns
from tandem.workers.logs import of_requests
from tandem.workers.prefill.forwards import EndedPrompts, PromptForward, PromptForwards, Sampling
from tandem.workers.prefill.prompt_readers import PromptReaders
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.guide_errors import guide_error
from tandem.workers.requests.prefill_request import PrefillRequest, PrefillResult
from tandem.workers.requests.prompt import Prompt
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.sampling.guided import Constraint, masks_of
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.prompt_logprobs import PromptLogprobs
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import StepBatch
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.001
SAMPLE_POLL_SECONDS = 0.0001
MOST_AHEAD = 3  # forwards: one runs, one is after the step in flight, one after the next


class Prefills:
    """Owned by the step thread; every method runs there.

    The Scheduler decides what is computed, the Handoff what may be written. Only the end of a request waits for its
    writes: the next forward is launched while they are under way, and the signal is posted after them.

    A computed prompt goes to its destination: the Handoff, or this worker's own decode side. While rows are decoded
    nothing here waits for the device: it looks for first tokens between steps.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        handoff: Handoff,
        speculative: SpeculativePrefill,
        retired: RetiredSequences,
        meter: PushMeter,
        ids: SequenceIds,
        settings: LoopSettings,
        slots: SlotTurns,
        most_bytes: MostBytes = any_number,
    ) -> None:
        self._engine, self._most_bytes, self._slots = engine, most_bytes, slots
        self._scheduler = scheduler
        self._handoff, self._speculative, self._retired = handoff, speculative, retired
        self._forwards = PromptForwards(engine, meter)
        self.readers = PromptReaders(engine, scheduler, retired, ids, self._forwards, settings)
        self._ids = ids
        self._max_batch_tokens = settings.max_batch_tokens
        self._sharing = settings.sharing
        self._eos_token_ids = settings.eos_token_ids
        self._arriving: list[Prompt] = []
        self._sampling: deque[Sampling] = deque()
        self._ahead: deque[IsPast] = deque()  # of forwards launched during the decode side's work

    # Commands

    def speculate(self, request_id: str, prompt: PromptSpec) -> "Future[FirstToken] | None":
        """Prefills a prompt that submit() is to come for. abort() or its lease end it where no room is found for it.

        Launches its first forward where there is nothing else to do; its first token is in the future once it is
        sampled. One prompt at a time: another is not heeded, nor is one that has ended or came before: None.
        """
        if not self._handoff.is_new(request_id) or not self._scheduler.is_idle:
            return None
        return self._speculative.take(request_id, prompt)

    def submit(
        self,
        request_id: str,
        prompt: PromptSpec,
        params: SamplingParams,
        reservation: Reservation,
        constraint: Constraint | None = None,
        gatherer: PromptLogprobs | None = None,
    ) -> "Future[PrefillResult]":
        """Queues a prompt; the future ends when its first token is sampled and all its KV is at the receiver.
        gatherer: with one, all is computed.

        A second call with the same request_id gets the first one's future. Raises InvalidCall, InvalidPositionMap,
        Aborted, StaleEpoch, StaleReservation. The lease runs until attend().
        """
        known = self._handoff.known(request_id)
        if known is not None:
            return known
        position_map = self._checked_map(prompt, reservation)
        lease = self._handoff.lease(reservation)
        request = PrefillRequest(
            request_id,
            self._ids.take(),
            prompt,
            params,
            reservation,
            position_map,
            lease,
            destination=self._handoff,
            constraint=constraint,
            gatherer=gatherer,
        )
        request.begin_output()
        self._handoff.begin(request)
        speculative = None if gatherer else self._speculative.claim(request_id, prompt)
        if speculative is not None:
            request.take_over(speculative)
        self._scheduler.add(request)
        return request.result

    def add(self, prompt: Prompt) -> None:
        """Computes a prompt into its sequence, which is its destination's, and has its room."""
        self._await_pages(prompt)
        self._scheduler.add(prompt)

    def withdraw(self, prompt: Prompt) -> None:
        """No more is computed of a prompt that add() got, and its sequence goes."""
        self._leave(prompt)
        self._retired.add(prompt.sequence_id)

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

    def part(self, pe: int, error: Exception) -> None:
        """See Handoff.part."""
        self._handoff.part(pe, error, self._stop)

    @property
    def computed_tokens(self) -> int:
        """The number of prompt tokens computed so far, including prompts that were begun speculatively."""
        return self._forwards.computed_tokens + self._speculative.computed_tokens

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + (self._speculative.request_id is not None)

    @property
    def num_running(self) -> int:
        sampling = sum(not prompt.left for sampling in self._sampling for prompt in sampling.prompts)
        return self._scheduler.num_running + sampling + self._handoff.num_draining + self.readers.num_pending

    # Steps

    @property
    def is_ahead(self) -> bool:
        """Whether so many forwards are under way that another would keep rows waiting which are yet to come."""
        while self._ahead and self._ahead[0]():
            self._ahead.popleft()
        return len(self._ahead) + self.readers.num_pending >= MOST_AHEAD

    def upkeep(self) -> None:
        """Prepares for a batch: ends requests that ended from outside, and starts waiting prompts for which there is
        room."""
        self._speculative.expire()
        self._retired.settle()
        self.poll()
        self._handoff.upkeep(self._stop)
        arriving, self._arriving = self._arriving, []
        for prompt in filter(self._scheduler.is_running, arriving):
            self._await_pages(prompt)
        self._scheduler.order(now := time.perf_counter())
        waits = self._scheduler.num_waiting
        for request in self._scheduler.admitted(self._has_room, self._has_slot, now) if waits else ():
            self._attempt([request], lambda request=request: self._begin(request))

    def poll(self) -> None:
        """First tokens that have come, and writes that are quiet by now. Waits for nothing."""
        while self._sampling and self._sampling[0].is_done:
            self._take(self._sampling.popleft())
        self.readers.poll(self._fail)
        if self._handoff.num_draining:
            self._handoff.settle()

    def compute(self, batch: StepBatch, *, beside: bool, forward: PromptForward | None = None) -> float:
        """Computes the batch's chunks; how long nothing is to be done after them, in seconds.

        beside: whether the decode side has work, so that nothing may wait here. forward: see PromptForwards.launch.
        """
        batch, read = batch.parted()
        if read:
            self._attempt([prompt for prompt, _ in read], lambda: self.readers.launch(read, beside=beside))
        if batch.launched:
            self._attempt(batch.launched, lambda: self._send_launched(batch.launched, beside))
        if batch.chunks:
            self._attempt([prompt for prompt, _ in batch.chunks], lambda: self._forward(batch, beside, forward))
        if self._sampling or self.readers.num_pending:
            self.poll()
        if self.is_ahead:
            return SAMPLE_POLL_SECONDS
        if self._scheduler.num_running or ((batch.chunks or batch.launched or read) and self._scheduler.num_waiting):
            return 0
        if self._sampling or self.readers.num_pending:
            return SAMPLE_POLL_SECONDS
        return DRAIN_POLL_SECONDS if self._handoff.num_draining or len(self._retired) else RECALL_POLL_SECONDS

    def _attempt(self, prompts: Sequence[Prompt], work: Callable[[], None]) -> None:
        """Does what brings `prompts` on. Where it fails, they do, and no others."""
        try:
            work()
        except Exception as error:
            log.exception("a prefill forward failed", extra=of_requests(*prompts))
            self._fail([prompt for prompt in prompts if self._scheduler.is_running(prompt)], error)

    def _checked_map(self, prompt: PromptSpec, reservation: Reservation) -> PositionMap:
        position_map = self._handoff.check(reservation, len(prompt), prompt.encoder.border)
        shortage = self._engine.room(len(prompt), self._max_batch_tokens, prompt.encoder.length).shortage
        if shortage is not None:
            raise InvalidCall(f"the prompt needs {shortage[0]} pages; this worker has {shortage[1]}")
        return position_map

    def _has_room(self, request: Prompt) -> bool:
        """Whether there are pages for a prompt; a speculative one gives way."""
        needed = request.num_tokens, self._max_batch_tokens, request.spec.encoder.length
        return self._makes(lambda: self._engine.room(*needed).fits)

    def _has_slot(self, request: Prompt) -> bool:
        """Whether there is a slot for a prompt's adapter; a speculative one gives way."""
        adapter = request.spec.adapter
        if self._makes(lambda: self._engine.has_slot(adapter)):
            return True
        self._slots.wait(adapter, request.spec.priority)  # before new requests that would be decoded here
        return False

    def _makes(self, fits: Callable[[], bool]) -> bool:
        """Whether it fits, at the cost of the speculative prompt if need be."""
        return fits() or (self._speculative.drop() and fits())

    def _begin(self, request: Prompt) -> None:
        shares, most = self._sharing and request.matches, self._most_bytes()
        asked = Admission(request.spec, request.num_tokens, self._max_batch_tokens, shares, most_bytes=most)
        request.cached_tokens = request.computed = self._engine.admit(request.sequence_id, asked)
        self._slots.took(request.spec.adapter)
        request.started = time.perf_counter()
        begun = self._engine.sequence(request.sequence_id)
        request.host_cached_tokens, request.disk_cached_tokens = begun.num_fetched, begun.num_lifted
        self._await_pages(request)

    def _await_pages(self, prompt: Prompt) -> None:
        prompt.arriving = not self._engine.has_arrived(prompt.sequence_id)
        if prompt.arriving:
            self._arriving.append(prompt)

    def _forward(self, batch: StepBatch, beside: bool, forward: PromptForward | None) -> None:
        """Computes one chunk of each prompt."""
        for prompt, _ in batch.chunks:
            prompt.started = prompt.started or time.perf_counter()
        ended = self._forwards.launch(batch.chunks, alone=batch.alone, forward=forward)
        if ended is not None:
            self._sample(ended)
        mark = self._engine.mark() if beside and forward is None else None
        if mark is not None:
            self._ahead.append(mark)
        if self._sharing:
            self._forwards.publish(batch.chunks)
        if ended is not None and not beside:
            self._await_first_tokens(ended.prompts)

    def _send_launched(self, prompts: Sequence[Prompt], beside: bool) -> None:
        """Prompts that were launched as a whole before their receiver was known; they have come to their end."""
        for prompt in prompts:
            self._sample(self._forwards.launched(prompt))
            if not beside:
                self._await_first_tokens([prompt])

    def _sample(self, ended: EndedPrompts) -> None:
        """Samples the first tokens of prompts that are launched in full. Then it sends what is left, then the
        signals."""
        prompts = ended.prompts
        posts = [prompt.destination.post(prompt, row) for row, prompt in enumerate(prompts)]
        sampling = self._parameters(prompts)
        pending = self._forwards.sample(
            ended,
            sampling,
            np.array([prompt.num_tokens for prompt in prompts], np.int64),
            [post for post in posts if post is not None],
            masks_of(prompt.constraint for prompt in prompts) if sampling.is_guided else None,
        )
        if self._sharing:  # while the device computes: a reader of these pages is launched after it
            for prompt in (prompt for prompt in prompts if prompt.shares):
                self._engine.publish(prompt.sequence_id, prompt.token_ids, prompt.spec.salt)
        for prompt in prompts:
            self._scheduler.remove(prompt)
        self._sampling.append(Sampling(prompts, pending))

    def _await_first_tokens(self, prompts: Sequence[Prompt]) -> None:
        """Waits on the host, where the worker has nothing else to do."""
        self._await_samples()
        self._handoff.await_quiet(prompts)

    def _parameters(self, prompts: Sequence[Prompt]) -> SampleBatch:
        """Returns the sampling parameters of the prompts' first tokens."""
        rules = [prompt.logit_rules(self._eos_token_ids) for prompt in prompts]
        return SampleBatch.from_params([prompt.params for prompt in prompts], rules)

    def _await_samples(self) -> None:
        """Waits for the device, and takes all first tokens."""
        while self._sampling:
            sampling = self._sampling[0]
            while self._handoff.num_draining and not sampling.is_done:  # their callers should not wait for it
                self._handoff.settle()
                time.sleep(QUIET_POLL_SECONDS)
            self._take(self._sampling.popleft())

    def _take(self, sampling: Sampling) -> None:
        """Waits for first tokens, and hands them out."""
        try:
            samples = sampling.pending.wait()
        except Exception as error:
            log.exception("the sampling of first tokens failed", extra=of_requests(*sampling.prompts))
            self._fail(sampling.prompts, error)
            return
        for row, prompt in enumerate(sampling.prompts):
            if (error := guide_error(prompt.constraint)) is not None:
                self._fail([prompt], error)
            if not prompt.left:
                prompt.left = True
                if prompt.gatherer is not None:
                    prompt.gatherer.deliver()
                first = FirstToken(int(samples.token_ids[row]), samples.logprobs[row])
                if first.token_id == NOT_FINITE:
                    prompt.destination.fail(prompt, LogitsNotFinite(prompt.request_id, prompt.num_tokens))
                else:
                    prompt.destination.finish(prompt, first)

    def _stop(self, request: PrefillRequest, error: Exception) -> None:
        """Nothing more is computed for the request; its caller hears `error` once its writes are quiet."""
        if self._scheduler.is_waiting(request):
            self._leave(request)
            self._handoff.end(request, error)
        elif not request.left:
            self._leave(request)
            self._handoff.fail(request, error)

    def _fail(self, prompts: Sequence[Prompt], error: Exception) -> None:
        for prompt in prompts:
            if not prompt.left:
                self._leave(prompt)
                what, lost = f"prefill of {prompt.request_id!r}", self._engine.lost
                failure = forward_failed(what, error, str(error) if isinstance(error, PeerGone) else lost)
                prompt.destination.fail(prompt, error if isinstance(error, WorkerError) else failure)

    def _leave(self, prompt: Prompt) -> None:
        """No forward has the prompt any more, and its first token is not wanted."""
        prompt.left = True
        self._scheduler.remove(prompt)
