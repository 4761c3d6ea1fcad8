"""The one loop of every worker: upkeep of handoffs → Scheduler.next_batch() → launch → deliver."""

import time
from concurrent.futures import Future
from typing import NamedTuple

from tandem.cache.operations.holdings import PageCounts
from tandem.proto import worker_pb2
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.decode.decodes import Decodes
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.captures import Captures
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import PeerLost
from tandem.workers.handoff.handoff import Handoff, settled
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.prefill.prefills import Prefills
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.requests.token_stream import TokenFanout
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.scheduling.batch import DecodeStep, StepBatch
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.scheduling.step_meter import StepMeter
from tandem.workers.scheduling.token_pace import TokenPace
from tandem.workers.speculation.drafter import Drafter
from tandem.workers.speculation.speculation import Speculation
from tandem.workers.steps.joint_forward import JointForward, is_joint
from tandem.workers.steps.lifts import Lifts
from tandem.workers.wire.lease import Clock
from tandem.workers.wire.prompt_spec import PromptSpec


class Ends(NamedTuple):
    """The objects through which a loop reaches the outside."""

    meter: PushMeter  # what the cache writes through
    fanout: TokenFanout
    threads: KernelThreads
    drafter: Drafter | None = None


class StepLoop:
    """Owned by the step thread. Every worker has both sides: `prefills` computes prompts, for peers or for rows of this
    worker, and `decodes` steps rows. What a worker does is what its scheduler is given.
    """

    def __init__(
        self,
        engine: Engine,
        settings: LoopSettings,
        ends: Ends,
        clock: Clock = time.monotonic,
    ) -> None:
        self.counters = counters = Counters()
        self.meter = StepMeter()
        self.engine = engine
        bound, most, share = settings.token_seconds, settings.max_batch_tokens, settings.token_share
        pace = TokenPace(bound, most, share, engine.capabilities.sizes)
        self.scheduler = scheduler = Scheduler(most, pace, settings.priority_seconds)
        ids, retired = SequenceIds(), RetiredSequences(engine)
        self._retired = retired
        handoff = Handoff(engine, retired, counters, settings, clock)
        price = self._most_bytes
        self.has_disk, self._shares = engine.has_disk, settings.sharing
        self.lifts = Lifts(engine, self._most_bytes_read, self._may_lift)
        speculative = SpeculativePrefill(engine, retired, ids, settings, clock, price)
        speculated = settings.speculation
        speculation = Speculation(ends.drafter, engine, speculated.tokens, speculated.max_step_tokens, counters)
        self._reservations = reservations = Reservations(engine, counters, ids, settings, clock, price)
        self.prefills = Prefills(
            engine,
            scheduler,
            handoff,
            speculative,
            retired,
            ends.meter,
            ids,
            settings,
            reservations.slots,
            price,
        )
        self.decodes = Decodes(
            engine,
            scheduler,
            reservations,
            retired,
            ends.fanout,
            ends.threads,
            self.prefills,
            settings,
            clock,
            speculation,
            counters,
        )

    def capture(self, wanted: Captures) -> None:
        """See Engine.capture."""
        self.engine.capture(wanted)
        self.scheduler.pace.sizes = self.engine.capabilities.sizes

    def abort(self, request_id: str, writer_quiet: bool) -> "list[Future[bool]]":
        """Ends a request on both sides. Each future tells whether that side knew it; see Prefills and Decodes.

        writer_quiet: for the decode side.
        """
        return [self.prefills.abort(request_id), settled(self.decodes.abort(request_id, writer_quiet))]

    def release(self, prefix: str, writer_quiet: bool) -> "list[Future[bool]]":
        """Aborts every request whose id begins with `prefix`. The futures end once this worker writes for none."""
        self.decodes.release(prefix, writer_quiet)
        return self.prefills.release(prefix)

    def check_peer(self, pe: int) -> None:
        """Raises PeerLost once the peer is lost, or with it the island."""
        if lost := self.engine.loss(pe):
            raise PeerLost(f"nothing can come from PE {pe}: {lost}")

    def part(self, pe: int) -> None:
        """Ends with PeerLost what a peer that was cut was to write or to get, see Transport.cut. All else goes on."""
        error = PeerLost(f"PE {pe} has left the island")
        self.prefills.part(pe, error)
        for request in self._reservations.part(pe):
            self.decodes.failed(request, error)
        self.engine.part(pe)

    def windows_past(self) -> "Future[None] | None":
        """See RetiredSequences.windows_past."""
        return self._retired.windows_past()

    @property
    def num_waiting(self) -> int:
        return self.prefills.num_waiting + self.decodes.num_waiting

    @property
    def num_running(self) -> int:
        return self.prefills.num_running + self.decodes.num_running

    def figures(self) -> worker_pb2.WorkerReport:
        """Reports how busy this worker is, without its prefixes. Runs on the step thread."""
        rows, positions = self.decodes.num_running, self.decodes.positions
        pages, adapters = self.engine.pages, [one for one in self.engine.adapters if not one.removed]
        return worker_pb2.WorkerReport(
            prompt_tokens=self.scheduler.num_prompt_tokens,
            rows=rows,
            positions=positions,
            token_seconds=self.meter.token_seconds,
            prompt_tokens_per_second=self.prompt_rate,
            free_pages=pages.free,
            parked=pages.parked,
            stored_price=self._stored_price(pages),
            adapters=b"".join(one.digest for one in adapters),
            resident_adapters=b"".join(one.digest for one in adapters if one.resident),
            prompt_tokens_per_second_beside_rows=self.scheduler.pace.prompt_rate(rows, positions) if rows else 0,
        )

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second, as measured without rows, or as the model of steps has them where rows never pause; 0
        before any were computed."""
        return self.meter.prompt_tokens_per_second or self.scheduler.pace.prompt_rate()

    def _stored_price(self, pages: PageCounts) -> float:
        """Returns the time to bring a token's pages back ÷ the time to compute it, at most 1. It weighs host memory and
        the disk by the bytes that are in each."""
        tiers = (
            (pages.host_bytes_used, self._most_bytes()),
            (
                max(pages.disk_bytes_used - pages.host_bytes_used, 0),
                self._most_bytes_read() if self.has_disk else None,
            ),
        )
        token_bytes, total = self.engine.layout.token_bytes, sum(used for used, _ in tiers)
        prices = ((used, 0.0 if most is None else min(token_bytes / max(most, 1), 1.0)) for used, most in tiers)
        return sum(used * price for used, price in prices) / max(total, 1)

    def _most_bytes(self) -> int | None:
        """See Admission: bytes that copies from the store move while a token is computed, as both were measured here.
        None before."""
        copies = self.engine.copy_rate
        prompts = self.meter.whole_prompt_rate or self.scheduler.pace.prompt_rate()
        return int(copies / prompts) if copies and prompts else None

    def _most_bytes_read(self) -> int | None:
        """Returns as _most_bytes(), for pages that are first read from a disk."""
        most_bytes, copies, reads = self._most_bytes(), self.engine.copy_rate, self.engine.disk_rate
        return int(most_bytes * reads / (copies + reads)) if most_bytes is not None and reads else None

    def _may_lift(self, prompt: PromptSpec) -> bool:
        """Returns whether the prompt's beginning may come from a disk."""
        return self._shares and not prompt.whole

    def step(self) -> float | None:
        """One step; see Steps."""
        if not self.has_disk:
            return self._step()
        self.lifts.upkeep()
        return self.lifts.soon(self._step())

    def _step(self) -> float | None:
        """While tokens of a decode step are to be read, nothing is launched: the device has its next step, and chunks
        of prompts after it."""
        prefills, decodes = self.prefills, self.decodes
        if decodes.is_reading:
            prefills.poll()
            return decodes.read()
        if (slots := self.engine.ready_slots) is not None:
            self.engine.widen(slots)
        prefills.upkeep()
        upkeep_again = decodes.upkeep()
        batch = self.scheduler.next_batch(prompts=not prefills.is_ahead)
        joint = is_joint(self.engine, batch)
        if joint and decodes.is_verifying:  # a joint forward takes its rows' tokens from a plain step, or from the host
            return decodes.compute(None, None) or 0
        self.meter.begin(batch)
        if joint:
            wait = prefill_wait = self._compute_jointly(batch)
        else:
            wait = decodes.compute(batch.decodes, upkeep_again)  # launched first: prompts are what may wait
            ends, beside = batch.ends_prompt, decodes.is_busy
            chunks = self.scheduler.pace.chunks_load(batch.chunks, joint=False)
            prefill_wait = prefills.compute(batch, beside=beside)
            decodes.ran_beside(chunks)
            if not beside:
                self.meter.end(batch, waited=ends)
        if decodes.has_joining:
            return 0
        return prefill_wait if wait is None else min(wait, prefill_wait)

    def _compute_jointly(self, batch: StepBatch) -> float:
        """Computes rows and chunks in one forward."""
        waits: list[float] = []

        def forward(step: DecodeStep) -> PendingSamples:
            joint = JointForward(self.engine, step)
            waits.append(self.prefills.compute(batch, beside=True, forward=joint))
            return joint.samples()

        self.decodes.ran_beside(self.scheduler.pace.chunks_load(batch.chunks, joint=True))
        wait = self.decodes.compute(batch.decodes, None, forward)
        return min([*waits, 0.0 if wait is None else wait])
