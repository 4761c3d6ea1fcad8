"""Two loops as they run, over wires and memories of token ids: PE 0 is mainly for prompts, PE 1 for decoding."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.errors import CacheError
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.transport import Int64Array
from tandem.workers.config import LoopSettings
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import PeerLost, WorkerError
from tandem.workers.requests.token_stream import TokenUpdate
from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import StepInputs
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import Samples
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.steps.step_loop import Ends, StepLoop
from tandem.workers.wire.reservation import Reservation
from tests.protocol.token_memory import LABELS, TokenMemory
from tests.protocol.wires import Endpoint, WireTransport
from tests.support.tvm_cache import TvmCache

PROMPT_TOKENS = 2
PREFILL, DECODE = 0, 1
LAYOUT = KVLayout((LayerGroup((0,), KV(1, 1)),), 1, torch.float32)


@dataclass(frozen=True)
class Shape:
    """The shape of the workers. Pages have one position each; num_signals: how many requests can be awaited at a
    time."""

    num_pages: int = 4
    num_signals: int = 2
    max_tokens: int = 2
    max_batch_tokens: int = 1  # of the prefill worker
    sharing: bool = False
    overlapped: bool = False  # as on workers with CUDA graphs
    joint: bool = False  # whether one forward computes rows and chunks
    longest: int | None = None  # positions of one sequence; None: as many as pages


@dataclass(eq=False)
class Ticks:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Stream:
    """The output of one StartGenerate for its client. left: nobody reads it any more."""

    label: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    left: bool = False


class Fanout:
    """Hands tokens out, and notes tokens that are not the next one of their stream."""

    def __init__(self, findings: list[str]) -> None:
        self._findings = findings

    def publish(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            stream: Stream = update.token_stream  # type: ignore[assignment]
            for token in update.run.token_ids:
                stream.tokens.append(token)
                due = LABELS * stream.label + stream.prompt_tokens + len(stream.tokens)
                if token != due or stream.ended is not None:
                    self._findings.append(f"token {token} came where {due} was due, {stream}")
            if update.run.reason != FinishReason.RUNNING:
                stream.ended = update.run.reason

    def fail(self, stream: Stream, error: WorkerError) -> None:
        if isinstance(error, PeerLost):  # its gateway places the request again
            stream.left = True
            return
        self._findings.append(f"a stream failed: {error}")


@dataclass(eq=False)
class Step:
    """A forward that was launched; it computes when the device comes to it."""

    plan: Forward
    tokens: Int64Array
    sources: Int64Array | None  # of a decode step; None: chunks of prompts
    last_rows: Int64Array
    drawn: Int64Array | None = None

    def is_past(self) -> bool:
        return self.drawn is not None


class CountingModel:
    """A model whose next token is its input plus one, behind the interface of ModelRunner.

    With overlap scheduling forwards are computed one by one in compute_next(), or when somebody waits for them; those
    that are pushed are computed when they are launched, behind all others.
    """

    drafts = next_drafts = None  # no model drafts
    graph_sizes = GraphSizes()
    adapters = None

    def __init__(self, cache: TvmCache, shape: Shape, findings: list[str]) -> None:
        self._cache = cache
        self._findings = findings
        self.overlaps, self._joint = shape.overlapped, shape.joint
        self.launched: deque[Step] = deque()
        self._foreseen: tuple[int, ...] | None = None
        self._last = np.empty(0, np.int64)

    def forward(self, token_ids: Int64Array, plan: Forward, last_rows: Int64Array) -> Int64Array:
        kv = torch.from_numpy(token_ids.astype(np.float32))[:, None, None]
        self._cache.attention(plan, 0, kv, kv, kv)
        return token_ids[last_rows] + 1

    def takes_prompts(self, num_rows: int, num_sequences: int, num_tokens: int) -> bool:
        return self._joint

    def step_with_prompts(
        self, sequence_ids: tuple[int, ...], inputs: StepInputs, prompts: PromptChunks
    ) -> "tuple[Drawn, Step]":
        pending = self.step(sequence_ids, *inputs)
        return pending, self.prompts(prompts, push=False)[0]

    def has_prompt_graph(self, num_sequences: int, num_tokens: int) -> bool:
        return False

    def prompts(self, prompts: PromptChunks, *, push: bool) -> tuple[Step, None]:
        sequence_ids, chunks, lengths = prompts
        appends = np.array([chunk.size for chunk in chunks])
        stored = np.array([self._cache.num_tokens(sequence) for sequence in sequence_ids])
        plan = self._cache.begin_forward(sequence_ids, appends, lengths, push=push)
        last_rows = np.cumsum(appends)[stored + appends == lengths] - 1
        step = Step(plan, np.concatenate(chunks), None, last_rows)
        if self.overlaps and not self._cache._marks.count:
            self.launched.append(step)
        else:
            self.drain()
            step.drawn = self.forward(step.tokens, plan, last_rows)
            self._cache.end_forward(plan)
        return step, None

    def sample_async(self, logits: Step, *_: object) -> "tuple[Int64Array, Drawn]":
        return np.zeros_like(logits.last_rows) if logits.drawn is None else logits.drawn, Drawn(self, logits)

    def step(
        self, sequence_ids: tuple[int, ...], tokens: Int64Array, sources: Int64Array, *rest: object, alone: bool = False
    ) -> "Drawn":
        plan = self._cache.begin_forward(sequence_ids, np.ones(len(sequence_ids), np.int64))
        step = Step(plan, tokens, sources, np.arange(tokens.size))
        self.launched.append(step)
        if not self.overlaps:
            self.drain()
        return Drawn(self, step)

    def foresee(self, sequence_ids: tuple[int, ...], *rest: object) -> None:
        self._cache._growth.foresee(sequence_ids)
        self._foreseen = sequence_ids

    def step_foreseen(self, sequence_ids: tuple[int, ...], tokens: Int64Array) -> "Drawn | None":
        foreseen, self._foreseen = self._foreseen, None
        return self.step(sequence_ids, tokens, np.full(tokens.size, -1)) if foreseen == sequence_ids else None

    def compute_next(self) -> None:
        step = self.launched.popleft()
        inputs = step.tokens
        if step.sources is not None:
            sampled = self._last[step.sources] if self._last.size else step.tokens
            inputs = np.where(step.sources < 0, step.tokens, sampled)
        try:
            step.drawn = self.forward(inputs, step.plan, step.last_rows)
        except CacheError as error:
            self._findings.append(f"the device computes for a sequence that is gone: {error}")
            step.drawn = np.zeros(step.last_rows.size, np.int64)
        if step.sources is not None:
            self._last = step.drawn

    def mark(self) -> Callable[[], bool] | None:
        return self.launched[-1].is_past if self.launched else None

    def drain(self) -> None:
        while self.launched:
            self.compute_next()


@dataclass(frozen=True, eq=False)
class Drawn:
    model: CountingModel
    step: Step

    def is_done(self) -> bool:
        return self.step.drawn is not None

    def wait(self) -> Samples:
        self.model.drain()
        assert self.step.drawn is not None
        return Samples(self.step.drawn, [None] * self.step.drawn.size)


class Unmetered:
    """Stands for a PushMeter: no time passes."""

    seconds = 0.0


class SmallIsland:
    def __init__(
        self,
        shape: Shape,
        epoch: int,
        lease_seconds: float,
        clock: Ticks,
        findings: list[str],
        vacant: int | None = None,
    ) -> None:
        """vacant: the PE whose place is empty until replace()."""
        self.epochs = [0 if pe == vacant else epoch for pe in (PREFILL, DECODE)]
        self._shape, self._lease_seconds, self._clock, self._findings = shape, lease_seconds, clock, findings
        self.memories = [self._memory(pe) for pe in (PREFILL, DECODE)]
        self.endpoints = [self._endpoint(memory) for memory in self.memories]
        self.transports = [self._transport(pe) for pe in (PREFILL, DECODE)]
        self.caches = [self._cache(pe) for pe in (PREFILL, DECODE)]
        self.devices = [CountingModel(cache, shape, findings) for cache in self.caches]
        self.loops = [self._loop(pe) for pe in (PREFILL, DECODE)]

    @property
    def epoch(self) -> int:
        """The latest epoch."""
        return max(self.epochs)

    def replace(self, pe: int) -> None:
        """Starts a process in a vacant place, or in the place of a worker with which the other one has parted."""
        self.epochs[pe] = self.epoch + 1
        self.memories[pe] = self._memory(pe)
        self.endpoints[pe] = self._endpoint(self.memories[pe])
        self.transports[pe] = self._transport(pe)
        self.caches[pe] = self._cache(pe)
        self.devices[pe] = CountingModel(self.caches[pe], self._shape, self._findings)
        self.loops[pe] = self._loop(pe)
        other = 1 - pe
        self.transports[other].reach_endpoint(self.endpoints[pe])
        self.loops[other].engine.welcome(pe, self.epochs[pe])

    def _memory(self, pe: int) -> TokenMemory:
        names = ("the prefill worker", "the decode worker")
        return TokenMemory(names[pe], self._shape.num_pages, self._findings)

    @property
    def _rows(self) -> int:
        return mailbox_rows(self._shape.num_signals, 2)

    def _endpoint(self, memory: TokenMemory) -> Endpoint:
        return Endpoint(memory, np.zeros((self._rows, 2), np.int64))

    def _transport(self, pe: int) -> WireTransport:
        pages, epoch, epochs = (self._shape.num_pages,), self.epochs[pe], tuple(self.epochs)
        config = TransportConfig(pe, 2, LAYOUT, pages, self._rows, "small", epoch, epochs=epochs)
        return WireTransport(config, self.endpoints)

    def _cache(self, pe: int) -> TvmCache:
        return TvmCache(
            LAYOUT,
            self.transports[pe].pools,
            max_sequences=4,
            max_sequence_length=self._shape.longest or self._shape.num_pages,
            rope=RopeParameters("none", 0),
            writer=self.transports[pe],
            kernels=self.memories[pe].bound,
        )

    def _loop(self, pe: int) -> StepLoop:
        shape = self._shape
        settings = LoopSettings(
            self._lease_seconds, shape.sharing, max_batch_tokens=shape.max_batch_tokens, max_sequences=4
        )
        ends = Ends(Unmetered(), Fanout(self._findings), KernelThreads(None, 1))  # type: ignore[arg-type]
        engine = Engine(self.caches[pe], self.devices[pe], self.transports[pe])  # type: ignore[arg-type]
        return StepLoop(engine, settings, ends, self._clock)

    def start(self, pe: int, request_id: str, reservation: Reservation, stream: Stream) -> None:
        """Calls StartGenerate."""
        wanted = params(self._shape.max_tokens)
        self.loops[pe].decodes.start(request_id, reservation.reservation_id, wanted, stream)  # type: ignore[arg-type]

    def held_for_writers(self, pe: int) -> dict[int, int]:
        """Returns the token that a writer may write into each page of a worker."""
        reservations, incoming = self.loops[pe].decodes._reservations, self.caches[pe]._receptions.incoming
        held = {}
        for request in (*reservations._requests.values(), *reservations._draining.values()):
            (pages,) = incoming.get(request.sequence_id, (np.empty(0, np.int32),))
            tokens = request.prompt.token_ids[len(request.prompt) - pages.size :]
            held.update(zip(pages.tolist(), tokens.tolist(), strict=True))
        return held

    def is_idle(self, pes: Sequence[int]) -> bool:
        """Returns whether these workers hold nothing, know nothing and have nothing under way."""
        if any(self.devices[pe].launched for pe in pes):
            return False
        free = all(
            cache.is_empty and cache.num_free_pages == cache.num_pages and not cache.num_draining_pages
            for cache in map(self.caches.__getitem__, pes)
        )
        for loop in map(self.loops.__getitem__, pes):
            reservations, prefills = loop.decodes._reservations, loop.prefills
            signals = reservations._signals
            known = prefills._handoff._requests or len(reservations) or reservations._draining or loop.num_running
            if known or signals.num_free != len(signals._held):
                return False
        return free

    def state(self) -> str:
        counts = [(cache.num_free_pages, cache.num_draining_pages) for cache in self.caches]
        sent = [list(loop.prefills._handoff._requests) for loop in self.loops]
        received = [loop.decodes._reservations.request_ids() for loop in self.loops]
        return f"(free, draining) pages {counts}, prefilled for peers {sent}, reserved {received}"


def prompt_of(label: int) -> list[int]:
    return [LABELS * label + position for position in range(PROMPT_TOKENS)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
