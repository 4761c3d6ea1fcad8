"""The one loop of every worker: upkeep of handoffs → Scheduler.next_batch() → launch → deliver."""

import time
from concurrent.futures import Future

from tandem.cache.paged_cache import PagedKVCache
from tandem.proto import worker_pb2
from tandem.transfer.transport import Transport
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.decode.decodes import Decodes
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.handoff.handoff import Handoff, settled
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.prefill.prefills import Prefills
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.requests.token_stream import TokenFanout
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.scheduling.step_meter import StepMeter
from tandem.workers.wire.lease import Clock


class StepLoop:
    """Owned by the step thread. Its role is what its scheduler is given: prompts by `prefills`, rows by `decodes`.

    give_prefills() and give_decodes() say which of them there are. No worker has both yet: recalls of both directions
    would meet in one lane of the mailbox (transfer/recall.py).
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedKVCache,
        transport: Transport,
        settings: LoopSettings,
        clock: Clock = time.monotonic,
    ) -> None:
        self.prefills: Prefills | None = None
        self.decodes: Decodes | None = None
        self.counters = Counters()
        self.meter = StepMeter()
        self._runner = runner
        self._cache = cache
        self._transport = transport
        self._settings = settings
        self._clock = clock
        self._scheduler = Scheduler(settings.max_batch_tokens)
        self._ids = SequenceIds()

    def give_prefills(self, meter: PushMeter) -> Prefills:
        """From now on this loop computes prompts, too. meter: what the cache writes through."""
        runner, cache, settings, clock = self._runner, self._cache, self._settings, self._clock
        handoff = Handoff(cache, self._transport, self.counters, settings, clock)
        speculative = SpeculativePrefill(runner, cache, self._ids, settings, clock)
        self.prefills = Prefills(runner, cache, self._scheduler, handoff, speculative, meter, self._ids, settings)
        return self.prefills

    def give_decodes(self, fanout: TokenFanout, threads: KernelThreads) -> Decodes:
        """From now on this loop decodes sequences, too; their tokens go to `fanout`."""
        runner, cache, settings, rows = self._runner, self._cache, self._settings, self._scheduler.rows
        reservations = Reservations(cache, self._transport, self.counters, self._ids, settings, self._clock)
        self.decodes = Decodes(runner, cache, rows, reservations, fanout, threads, settings)
        return self.decodes

    def abort(self, request_id: str, writer_quiet: bool) -> "list[Future[bool]]":
        """Ends a request on both sides. Each future says whether that side knew it; see Prefills and Decodes."""
        answers = [] if self.prefills is None else [self.prefills.abort(request_id)]
        if self.decodes is not None:
            answers.append(settled(self.decodes.abort(request_id, writer_quiet)))
        return answers

    def release(self, prefix: str, writer_quiet: bool) -> "list[Future[bool]]":
        """Aborts every request whose id begins with `prefix`. The futures end once this worker writes for none."""
        if self.decodes is not None:
            self.decodes.release(prefix, writer_quiet)
        return [] if self.prefills is None else self.prefills.release(prefix)

    @property
    def num_waiting(self) -> int:
        return sum(side.num_waiting for side in (self.prefills, self.decodes) if side is not None)

    @property
    def num_running(self) -> int:
        return sum(side.num_running for side in (self.prefills, self.decodes) if side is not None)

    def figures(self, free_pages: int) -> worker_pb2.WorkerReport:
        """How busy this worker is, without its prefixes. On the step thread."""
        rows = self._scheduler.rows
        return worker_pb2.WorkerReport(
            prompt_tokens=self._scheduler.num_prompt_tokens,
            rows=len(rows),
            positions=int(rows.lengths.sum()),
            token_seconds=self.meter.token_seconds,
            prompt_tokens_per_second=self.meter.prompt_tokens_per_second,
            free_pages=free_pages,
        )

    def step(self) -> float | None:
        """One step; see Steps. While tokens of a decode step are to be read, nothing else is scheduled."""
        prefills, decodes = self.prefills, self.decodes
        if decodes is not None and decodes.is_reading:
            return decodes.read()
        if prefills is not None:
            prefills.upkeep()
        upkeep_again = None if decodes is None else decodes.upkeep()
        batch = self._scheduler.next_batch()
        self.meter.begin(batch)
        wait = upkeep_again
        if decodes is not None:
            wait = decodes.compute(batch.decodes, upkeep_again)  # launched first: prompts wait for their first tokens
        if prefills is not None:
            ends = batch.ends_prompt
            prefill_wait = prefills.compute(batch)
            wait = prefill_wait if wait is None else min(wait, prefill_wait)
            self.meter.end(batch, waited=ends)
        return wait
