"""One prefill and one decode loop as they run, over wires and memories of token ids."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.cache.attention.forward import Forward
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.transport import Int64Array
from tandem.workers.config import LoopSettings
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.errors import WorkerError
from tandem.workers.requests.token_stream import TokenUpdate
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import Samples
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.step_loop import StepLoop
from tandem.workers.wire.reservation import Reservation
from tests.protocol.token_memory import LABELS, TokenMemory
from tests.protocol.wires import Endpoint, WireTransport

PROMPT_TOKENS = 2
PREFILL, DECODE = 0, 1
LAYOUT = KVLayout((LayerGroup((0,), 1, 1),), 1, torch.float32)


@dataclass(frozen=True)
class Shape:
    """Of the workers. Pages have one position each; num_signals: how many requests can be awaited at a time."""

    num_pages: int = 4
    num_signals: int = 2
    max_tokens: int = 2
    max_batch_tokens: int = 1  # of the prefill worker
    sharing: bool = False
    overlapped: bool = False  # as on decode workers with CUDA graphs


@dataclass(eq=False)
class Ticks:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Stream:
    """What the client of one StartGenerate gets. left: nobody reads it any more."""

    label: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    left: bool = False


class Fanout:
    """Hands tokens out, and notes those that are not the next one of their stream."""

    def __init__(self, findings: list[str]) -> None:
        self._findings = findings

    def publish(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            stream: Stream = update.token_stream  # type: ignore[assignment]
            if update.token_id is not None:
                stream.tokens.append(update.token_id)
                due = LABELS * stream.label + stream.prompt_tokens + len(stream.tokens)
                if update.token_id != due or stream.ended is not None:
                    self._findings.append(f"token {update.token_id} came where {due} was due, {stream}")
            if update.finish_reason != FinishReason.RUNNING:
                stream.ended = update.finish_reason

    def fail(self, stream: Stream, error: WorkerError) -> None:
        self._findings.append(f"a stream failed: {error}")


@dataclass(eq=False)
class Step:
    """A decode step that was launched; it computes when the device comes to it."""

    plan: Forward
    tokens: Int64Array
    sources: Int64Array
    drawn: Int64Array | None = None


@dataclass(frozen=True)
class Known:
    """PendingSamples that are there."""

    samples: Samples

    def is_done(self) -> bool:
        return True

    def wait(self) -> Samples:
        return self.samples


class CountingModel:
    """A model whose next token is its input plus one, behind the interface of ModelRunner.

    With overlap scheduling steps are computed one by one in compute_next(), or when somebody waits for them.
    """

    def __init__(self, cache: PagedKVCache, overlaps: bool) -> None:
        self._cache = cache
        self.overlaps = overlaps
        self.launched: deque[Step] = deque()
        self._foreseen: tuple[int, ...] | None = None
        self._last = np.empty(0, np.int64)

    def forward(self, token_ids: Int64Array, plan: Forward, last_rows: Int64Array) -> Int64Array:
        kv = torch.from_numpy(token_ids.astype(np.float32))[:, None, None]
        self._cache.attention(plan, 0, kv, kv, kv)
        return token_ids[last_rows] + 1

    def has_prompt_graph(self, num_sequences: int, num_tokens: int) -> bool:
        return False

    def prompts(
        self, sequence_ids: list[int], chunks: list[Int64Array], lengths: list[int], *, push: bool
    ) -> Int64Array:
        appends = np.array([chunk.size for chunk in chunks])
        stored = np.array([self._cache.num_tokens(sequence) for sequence in sequence_ids])
        plan = self._cache.begin_forward(sequence_ids, appends, lengths, push=push)
        logits = self.forward(np.concatenate(chunks), plan, np.cumsum(appends)[stored + appends == lengths] - 1)
        self._cache.end_forward(plan)
        return logits

    def sample_async(self, logits: Int64Array, batch: object, positions: Int64Array) -> "tuple[Int64Array, Known]":
        return logits, Known(Samples(logits, [None] * logits.size))

    def step(self, sequence_ids: tuple[int, ...], tokens: Int64Array, sources: Int64Array, *rest: object) -> "Drawn":
        plan = self._cache.begin_forward(sequence_ids, np.ones(len(sequence_ids), np.int64))
        step = Step(plan, tokens, sources)
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
        drawn = self._last[step.sources] if self._last.size else step.tokens
        inputs = np.where(step.sources < 0, step.tokens, drawn)
        step.drawn = self._last = self.forward(inputs, step.plan, np.arange(inputs.size))

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
    def __init__(self, shape: Shape, epoch: int, lease_seconds: float, clock: Ticks, findings: list[str]) -> None:
        self.epoch = epoch
        self._max_tokens = shape.max_tokens
        rows = mailbox_rows(shape.num_signals, 2)
        names = ("the prefill worker", "the decode worker")
        memories = [TokenMemory(name, shape.num_pages, findings) for name in names]
        self.endpoints = [Endpoint(memory, np.zeros((rows, 2), np.int64)) for memory in memories]
        configs = [TransportConfig(pe, 2, LAYOUT, (shape.num_pages,), rows, "small", epoch) for pe in (PREFILL, DECODE)]
        self.transports = [WireTransport(config, self.endpoints) for config in configs]
        self.caches = [
            PagedKVCache(
                LAYOUT,
                transport.pools,
                max_sequences=4,
                max_sequence_length=shape.num_pages,
                rope=RopeParameters("none", 0),
                writer=transport,
                kernels=memory.bound,
            )
            for transport, memory in zip(self.transports, memories, strict=True)
        ]
        models = [CountingModel(cache, shape.overlapped) for cache in self.caches]
        self.device = models[DECODE]
        settings = LoopSettings(lease_seconds, shape.sharing, max_batch_tokens=shape.max_batch_tokens, max_sequences=4)
        self.loops = [
            StepLoop(model, cache, transport, settings, clock)  # type: ignore[arg-type]
            for model, cache, transport in zip(models, self.caches, self.transports, strict=True)
        ]
        self.prefill = self.loops[PREFILL].give_prefills(Unmetered())  # type: ignore[arg-type]
        self.decode = self.loops[DECODE].give_decodes(Fanout(findings), KernelThreads(None, 1))  # type: ignore[arg-type]

    def start(self, request_id: str, reservation: Reservation, stream: Stream) -> None:
        """StartGenerate."""
        wanted = params(self._max_tokens)
        self.decode.start(request_id, reservation.reservation_id, wanted, stream)  # type: ignore[arg-type]

    def held_for_writers(self) -> dict[int, int]:
        """The token that a writer may write into each page of the decode worker."""
        reservations, incoming = self.decode._reservations, self.caches[DECODE]._receptions.incoming
        held = {}
        for request in (*reservations._requests.values(), *reservations._draining.values()):
            (pages,) = incoming.get(request.sequence_id, (np.empty(0, np.int32),))
            tokens = request.prompt[len(request.prompt) - pages.size :]
            held.update(zip(pages.tolist(), tokens.tolist(), strict=True))
        return held

    @property
    def is_idle(self) -> bool:
        """Nothing is held, nothing is known, nothing is under way."""
        if self.device.launched:
            return False
        free = all(
            cache.is_empty and cache.num_free_pages == cache.num_pages and not cache.num_draining_pages
            for cache in self.caches
        )
        reservations = self.decode._reservations
        signals = reservations._signals
        known = self.prefill._handoff._requests or len(reservations) or reservations._draining
        return free and signals.num_free == len(signals._held) and not known

    def state(self) -> str:
        counts = [(cache.num_free_pages, cache.num_draining_pages) for cache in self.caches]
        return f"(free, draining) pages {counts}, at prefill {list(self.prefill._handoff._requests)}, " + (
            f"at decode {self.decode._reservations.request_ids()}"
        )


def prompt_of(label: int) -> list[int]:
    return [LABELS * label + position for position in range(PROMPT_TOKENS)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
