"""Sequences that this worker decodes: from their reservation over their prompt's KV to their last token."""

import logging
from collections.abc import Callable
from functools import partial

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.decode.guide_masks import GuideMasks
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.decode.local_prompts import LocalPrompts, PromptQueue
from tandem.workers.decode.parking import Parking
from tandem.workers.decode.prepared_row import PreparedRow
from tandem.workers.decode.published_prefixes import PublishedPrefixes
from tandem.workers.decode.steps_in_flight import LaunchedStep, StepsInFlight
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import CorruptKV, LogitsNotFinite, NoRoom, WorkerError, forward_failed
from tandem.workers.handoff.reservations import Ask, Reservations, landed
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.logs import of_requests
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.guide_errors import guide_error
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.requests.token_stream import TokenFanout, TokenStream, TokenUpdate
from tandem.workers.sampling.finish import FinishReason, FinishRule
from tandem.workers.sampling.guided import Constraint
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.prompt_logprobs import PromptLogprobs
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import DecodeStep
from tandem.workers.scheduling.decode_rows import StepInFlight
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.scheduling.step_time import NOTHING, StepLoad
from tandem.workers.speculation.speculation import Speculation
from tandem.workers.wire.lease import Clock
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation

log = logging.getLogger(__name__)
KV_POLL_SECONDS = 0.0003  # of awaited KV
IDLE_POLL_SECONDS = 0.00003  # of awaited KV where a device computes, and leaves this thread a core of its own
STEP_POLL_SECONDS = 0.0001
DELIVERY_SECONDS = 0.00001  # while a step computes: the event loop has the interpreter for the last one's tokens

StepForward = Callable[[DecodeStep], PendingSamples]


class Decodes:
    """Owned by the step thread; every method runs there.

    A request is in _reservations from PrepareReceive to its last token, and in _rows while it is stepped. In between
    it is in _awaiting while a peer writes its KV, in _local while this worker computes it, or in _parking.

    With overlap scheduling (see Capabilities) a step is launched before the tokens of the step before it are read. A
    request that stops still has one extra row in the step in flight. That row is ignored. Before a verify step whose
    drafts the host makes, the tokens of all steps are read. Nothing here waits for a device.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        reservations: Reservations,
        retired: RetiredSequences,
        fanout: TokenFanout,
        threads: KernelThreads,
        queue: PromptQueue,
        settings: LoopSettings,
        clock: Clock,
        speculation: Speculation,
        counters: Counters,
    ) -> None:
        """queue: computes this worker's own prompts."""
        self._engine, self._scheduler, self._rows = engine, scheduler, scheduler.rows
        self._reservations, self._fanout, self._threads = reservations, fanout, threads
        self._eos_token_ids, self._clock = settings.eos_token_ids, clock
        self.published = PublishedPrefixes(engine, reservations, sharing=settings.sharing)
        self._awaiting: list[DecodeRequest] = []
        self._local = LocalPrompts(queue, self, reservations, fanout)
        self._joining: list[DecodeRequest] = []  # their first token came since the last batch
        self._delivered: float | None = None  # when the tokens of the last step came; None behind a pause
        self._beside = NOTHING  # chunks that were launched since the last step
        self._speculation, self._steps = speculation, StepsInFlight(engine, retired)
        self._masks, self._prepared = GuideMasks(engine), PreparedRow(engine)
        self._parking = Parking(engine, scheduler, reservations, self._steps, counters, settings, clock, self)
        self._unpublished: list[DecodeRequest] = []
        self.decoded_tokens = 0  # so far

    # Commands

    def prepare(
        self,
        request_id: str,
        prompt: PromptSpec,
        max_tokens: int,
        writer_pe: int,
        writer_epoch: int = 0,
        *,
        parks: bool = True,
    ) -> Reservation:
        """See Reservations.prepare. Raises NoRoom also while older prompts of peers go first, or others by Parking."""
        if not (known := self._reservations.get(request_id) is not None) and self._scheduler.lacks_room:
            raise NoRoom(f"no room for request {request_id!r}: prompts of peers wait for it")
        prepare = partial(self._reservations.prepare, request_id, prompt, max_tokens, writer_pe, writer_epoch)
        return self._parking.reserve(Ask(prompt, max_tokens, writer_pe), prepare, known=known, parks=parks)

    def start(
        self,
        request_id: str,
        reservation_id: int,
        params: SamplingParams,
        token_stream: TokenStream,
        num_output: int = 0,
        constraint: Constraint | None = None,
        gatherer: PromptLogprobs | None = None,
    ) -> None:
        """Sends a reserved request's tokens to `token_stream` once its KV is here. Queues a local prompt now."""
        request = self._reservations.start(request_id, reservation_id, params.max_tokens, num_output)
        request.params, request.constraint, request.gatherer = params, constraint, gatherer
        request.rule, request.token_stream = FinishRule.of(params, self._eos_token_ids), token_stream
        if request.is_local:
            self._local.start(request, params)
            return
        self._awaiting.append(request)
        if len(self._reservations) == 1:  # so there is time
            self._prepared.prepare(request)

    def abort(self, request_id: str, writer_quiet: bool) -> bool:
        """Ends a request; its pages return now if no write can come any more, else they drain. Idempotent."""
        request = self._reservations.get(request_id)
        if request is None:
            return writer_quiet and self._reservations.settle_draining(request_id)
        self._rows.leave([request])
        self._end(request, writer_quiet)
        if request.token_stream is not None:
            self._fanout.publish([TokenUpdate(request.token_stream, TokenRun((), (), FinishReason.ABORT))])
        return True

    def release(self, prefix: str, writer_quiet: bool) -> None:
        """abort() for every request whose id begins with `prefix`: draining ones too, and those yet to arrive."""
        self._reservations.refuse(prefix)
        for request_id in [known for known in self._reservations.request_ids() if known.startswith(prefix)]:
            self.abort(request_id, writer_quiet)

    # Prompts that this worker computes itself; see LocalPrompts

    def begun(self, request: DecodeRequest) -> None:
        """Takes a request that has its first token. It gets a row in the next batch."""
        self._joining.append(request)

    def whole(self, request: DecodeRequest) -> None:
        """Takes a request that ended with its first token."""
        self._end(request, writer_quiet=True)

    @property
    def num_waiting(self) -> int:
        return len(self._reservations) - self.num_running - len(self._local) - len(self._parking)

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._joining) + len(self._parking.yielded)

    @property
    def positions(self) -> int:
        """The positions of all rows, also of those that pause for a prompt."""
        return self._rows.positions + self._parking.yielded.positions

    # Steps

    @property
    def is_reading(self) -> bool:
        """Returns whether tokens of a launched step have to be read before anything else is launched."""
        return self._steps.reading is not None

    @property
    def is_busy(self) -> bool:
        """Returns whether waiting for a prompt would hold somebody up."""
        return bool(self.num_running or self._awaiting or self._steps)

    @property
    def has_joining(self) -> bool:
        """Returns whether requests wait for nothing but the next batch."""
        return bool(self._joining)

    @property
    def is_verifying(self) -> bool:
        """Returns whether only a verify step may be launched after the step in flight."""
        return self._steps.behind is not None and self._steps.behind.verifies

    def ran_beside(self, chunks: StepLoad) -> None:
        """Notes that chunks were launched after the last step, or are launched with the next one."""
        self._beside = self._beside.plus(chunks)

    def upkeep(self) -> float | None:
        """Tends leases, recalls, and requests whose KV has come, before a batch. Returns when it has to run again."""
        reap_again = self._reservations.reap()
        self._joining += self._parking.upkeep()
        if self._awaiting:
            self._take_received()
        if self._joining:
            joining, self._joining = self._joining, []
            self._join(joining)
        self._threads.use(alone=self.num_waiting == 0)
        return min(filter(None, (reap_again, self._parking.again)), default=None)

    def compute(
        self, step: DecodeStep | None, upkeep_again: float | None, forward: StepForward | None = None
    ) -> float | None:
        """Launches a step of all rows, and reads one that is done. How long to wait then: see Steps.

        forward: launches the step, and more beside it; None: a forward of its own, which may verify drafts.
        """
        steps = self._steps
        if step is None and steps.behind is None:
            self._delivered, self._beside = None, NOTHING
            poll = IDLE_POLL_SECONDS if self._engine.capabilities.overlaps else KV_POLL_SECONDS
            return poll if self._awaiting else upkeep_again
        try:
            self._masks.settle()
            alone, behind = step is not None and forward is None, steps.behind
            if self.is_verifying:
                following = self._speculation.follow(self._rows) if alone else None
                if following is not None:
                    following.load = self._take_load(following.num_tokens)
                steps.launched(following, overlaps=True)
            elif (
                step is not None
                and alone
                and (drafts := self._speculation.propose(self._rows.requests, known=behind is None))
            ):
                if behind is None:
                    steps.reading = verification = self._speculation.launch(self._rows, step, drafts)
                    verification.load = load = self._take_load(verification.num_tokens)
                    self._masks.launched(step, verification.requests)
                    if not load.chunk:  # else the next launch would wait until the prompts are done
                        steps.behind = self._speculation.follow(self._rows)
                else:
                    steps.launched(None, overlaps=True)  # its tokens come before the drafts that follow them
            else:
                if forward is not None:
                    self._speculation.passed_over()
                launch = forward or (lambda step: self._speculation.step(self._rows, step))
                launched = None if step is None else self._launched(step, launch(step))
                steps.launched(launched, overlaps=self._engine.capabilities.overlaps)
            if behind is None:
                self._masks.settle()  # the device computes meanwhile
            self.published.prompts(self._unpublished)  # after the launch, for nobody's next token waits for it
            self._unpublished = []
        except Exception as error:
            return self._fail_all(error)
        return 0 if steps.reading is None else self.read()

    def read(self) -> float:
        """Hands out the tokens of the step that is read, once it is done. Returns how long to wait then."""
        in_flight = self._steps.reading
        assert in_flight is not None
        try:
            if not in_flight.pending.is_done():
                return STEP_POLL_SECONDS
            self._steps.reading = None
            self._deliver(in_flight)
        except Exception as error:
            return self._fail_all(error)
        return 0 if self._steps.behind is None else DELIVERY_SECONDS

    def _take_received(self) -> None:
        """Gives a row to every started request whose KV has come."""
        mailbox, joining, updates = self._reservations.mailbox(), [], []
        for request in landed(mailbox, self._awaiting):
            assert request.token_stream is not None
            self._awaiting.remove(request)
            try:
                reason = self._receive(request, mailbox)
            except Exception as error:
                if not isinstance(error, CorruptKV | LogitsNotFinite):
                    log.exception("receiving KV failed", extra=of_requests(request))
                    error = forward_failed(f"receiving KV of {request.request_id!r}", error, self._engine.lost)
                self.failed(request, error)
                continue
            if reason == FinishReason.RUNNING:
                joining.append(request)
                self._unpublished.append(request)
            else:
                updates.append(TokenUpdate(request.token_stream, TokenRun((), (), reason)))
                self._end(request, writer_quiet=True)
        if joining:
            self._join(joining)
        self._fanout.publish(updates)

    def _join(self, requests: list[DecodeRequest]) -> None:
        """Gives requests rows. If a request is alone, launches the step that was prepared for it before all else."""
        pending = None
        if len(requests) == 1 and not len(self._rows) and self._steps.behind is None:
            try:
                pending = self._prepared.launch(requests[0])
            except Exception as error:
                self._fail_all(error)
                return
        self._prepared.drop()
        self._rows.join(requests)
        if pending is not None:
            step = self._rows.next_step()
            assert step is not None
            self._steps.behind = self._launched(step, pending)

    def _receive(self, request: DecodeRequest, mailbox: Int64Array) -> FinishReason:
        """Takes the first token. A prompt that ends with it can be shared, and will not be stepped."""
        assert request.rule is not None
        token = self._reservations.receive(request, mailbox)
        if token == NOT_FINITE:
            raise LogitsNotFinite(request.request_id, len(request.prompt))
        request.begin(token)
        reason = request.rule.reason(token, 1)
        self.published.prompts([] if reason == FinishReason.RUNNING else [request])
        return reason

    def _launched(self, step: DecodeStep, pending: PendingSamples) -> StepInFlight:
        in_flight = self._rows.launched(step, pending, self._take_load(len(self._rows)))
        self._masks.launched(step, in_flight.requests)
        return in_flight

    def _take_load(self, tokens: int) -> StepLoad:
        beside, self._beside = self._beside, NOTHING
        self._rows.drafted = tokens - len(self._rows)
        return self._scheduler.pace.step_load(tokens, self._rows.positions, beside)

    def _deliver(self, in_flight: LaunchedStep) -> None:
        """Hands out the tokens of a step."""
        try:
            samples = in_flight.pending.wait()
        finally:
            self._steps.done(in_flight)
        before, self._delivered, runs = self._delivered, self._clock(), in_flight.runs(samples)
        in_flight.settle(samples, runs, is_last=self._steps.behind is None)
        updates, leaving, failed = [], [], []
        for request, run in zip(in_flight.requests, runs, strict=True):
            if request.ended:
                continue
            if run.reason == FinishReason.ERROR or guide_error(request.constraint) is not None:
                failed.append(request)
                run = TokenRun(run.token_ids[:-1], run.logprobs[:-1], FinishReason.RUNNING)
            assert request.token_stream is not None
            if run.token_ids:
                request.take(run.token_ids)
                updates.append(TokenUpdate(request.token_stream, run))
            if run.reason != FinishReason.RUNNING:
                leaving.append(request)
            self.decoded_tokens += len(run.token_ids)
        if leaving:
            self._rows.leave(leaving)
            for request in leaving:
                self._end(request, writer_quiet=True)
        self._fanout.publish(updates)
        if before is not None:
            self._scheduler.pace.measured(self._delivered - before, in_flight.load)
        if failed:
            self._fail_rows(failed)

    def _fail_rows(self, requests: list[DecodeRequest]) -> None:
        """Ends rows whose logits are not finite, so that nobody shares their KV, or whose masks have failed."""
        self._rows.leave(requests)
        for request in requests:
            position = len(request.prompt) + len(request.output)
            request.output.clear()
            self.failed(request, guide_error(request.constraint) or LogitsNotFinite(request.request_id, position))

    def _fail_all(self, error: Exception) -> float:
        """Ends all requests with a row, also in a step whose tokens are not read yet. Returns as read() does."""
        requests = [one for one in self._reservations.decoded() if one not in (*self._joining, *self._parking.rising)]
        log.error("a decode forward failed", exc_info=error, extra=of_requests(*requests))
        try:
            self._engine.drain()  # what was launched may still write to their pages
        except Exception:
            log.exception("the step in flight failed, too")
        self._steps.drop()
        self._masks.drop()
        self._rows.leave(requests)
        for request in requests:
            request.output.clear()
            self.failed(request, forward_failed(f"decode of {request.request_id!r}", error, self._engine.lost))
        return 0

    def failed(self, request: DecodeRequest, error: WorkerError) -> None:
        if request.token_stream is not None:
            self._fanout.fail(request.token_stream, error)
        self._end(request, writer_quiet=True)

    def _end(self, request: DecodeRequest, writer_quiet: bool) -> None:
        if not self._parking.withdraw(request):
            self.published.so_far(request)
            if not self._local.withdraw(request):
                self._steps.release(request)
        self._speculation.forget(request)
        request.ended = True
        self._reservations.end(request, writer_quiet)
        for requests in (self._awaiting, self._joining):
            if request in requests:
                requests.remove(request)
