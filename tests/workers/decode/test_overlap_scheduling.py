"""Overlap scheduling: what is launched before the tokens of the step before are known.

The runner here draws scripted tokens from the positions, and says when each step was launched and when it was read.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.completion import pack_payload, pack_signal
from tandem.transfer.recall import mailbox_rows
from tandem.workers.config import LoopSettings
from tandem.workers.decode.decodes import DELIVERY_SECONDS
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import WorkerError
from tandem.workers.handoff.handoff import RECALL_POLL_SECONDS
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.requests.token_stream import TokenFanout, TokenStream, TokenUpdate
from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.drafter import DraftAsk, Drafter
from tandem.workers.steps.step_loop import Ends, StepLoop
from tandem.workers.wire.reservation import Reservation
from tests.support.fake_transport import FakeFabric, FakeTransport
from tests.support.prompt_specs import spec_of
from tests.support.tvm_cache import TvmCache

PAGE_SIZE, NUM_PAGES, PROMPT = 4, 24, 5
LAYOUT = KVLayout((LayerGroup((0,), KV(1, 4)),), PAGE_SIZE, torch.float32)
NO_LOGPROBS: list[Any] = [None]


def token_at(sequence: int, position: int) -> int:
    """Returns the scripted model's token; never 0 and never the same for neighbours."""
    return 1 + (37 * sequence + 11 * position) % 97


class Held(NamedTuple):
    """A sequence in a verify step: the position of the first token sampled, its rows, and the rows whose drafts were
    accepted."""

    position: int
    rows: int
    held: int


class ScriptedNextDrafts:
    """Stands for NextDrafts: looks up what the drafter does, in the tokens of the script."""

    looks_up = True
    num_sequences = 5

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._remembered: list[int] = []  # lengths of the contexts, until the next verify step that follows none
        self.held: dict[int, Held] = {}

    def remember(self, contexts: list[np.ndarray]) -> None:
        assert [one.size for one in contexts] == [one.position for one in self.held.values()]
        self._remembered = list(self.held)

    def followed(
        self, sequence_ids: tuple[int, ...], sizes: list[int], positions: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The inputs of the step, and the positions that it really has."""
        assert list(sequence_ids) == list(self.held) == self._remembered
        assert positions.tolist() == [one.position + one.rows for one in self.held.values()]
        true = [one.position + one.held for one in self.held.values()]
        tokens = []
        for sequence, size, position in zip(sequence_ids, sizes, true, strict=True):
            context = np.array([token_at(sequence, index) for index in range(position)])
            (draft,) = self._drafter.propose([DraftAsk(sequence, context, max(size - 1, 1), SamplingParams())])
            inputs = np.zeros(size, np.int64)
            inputs[0] = context[-1]
            inputs[1 : 1 + draft.size] = draft[: size - 1]
            tokens.append(inputs)
        return tokens, np.array(true)


class ScriptedRunner:
    """Checks each input against the script, wherever it comes from, and grows the cache as a forward does."""

    adapters = None

    def __init__(self, cache: TvmCache) -> None:
        self._cache = cache
        self._last: list[int] = []
        self.overlaps = True
        self.next_drafts: ScriptedNextDrafts | None = None
        self.graph_sizes = GraphSizes()
        self.drafts = None
        self.log: list[str] = []
        self.fail_at: Callable[[int], bool] = lambda step: False
        self.fail_reading = False
        self.done_until = 1000  # steps before it are done
        self._foreseen: tuple[tuple[int, ...], SampleBatch, np.ndarray] | None = None

    def step(
        self,
        sequence_ids: tuple[int, ...],
        tokens: np.ndarray,
        sources: np.ndarray,
        sampling: SampleBatch,
        positions: np.ndarray,
        *,
        alone: bool = False,
    ) -> PendingSamples:
        step = sum(line.startswith("launch") for line in self.log)
        if self.fail_at(step):
            raise RuntimeError("no luck")
        inputs = [
            int(token) if source == ON_HOST else self._last[source]
            for token, source in zip(tokens, sources, strict=True)
        ]
        assert inputs == [token_at(s, p - 1) for s, p in zip(sequence_ids, positions, strict=True)]
        assert sampling.size == len(inputs)
        self._cache.begin_forward(sequence_ids, np.ones(len(inputs), np.int64))
        self._last = [token_at(s, p) for s, p in zip(sequence_ids, positions, strict=True)]
        self.log.append(f"launch {step}: {list(sequence_ids)}")
        return cast(PendingSamples, ScriptedSamples(self, step, list(self._last)))

    def verify(
        self,
        sequence_ids: tuple[int, ...],
        tokens: list[np.ndarray],
        sampling: SampleBatch,
        positions: np.ndarray,
        *,
        follows: bool = False,
    ) -> PendingSamples:
        step = sum(line.startswith("launch") for line in self.log)
        read = range(step - 1 if follows else step)
        assert all(f"read {before}" in self.log for before in read), "a step is in flight"
        sizes = [one.size for one in tokens]
        if follows:
            assert self.next_drafts is not None
            tokens, positions = self.next_drafts.followed(sequence_ids, sizes, positions)
        sampled, held = [], {}
        for sequence, inputs, position in zip(sequence_ids, tokens, positions.tolist(), strict=True):
            due = [token_at(sequence, position - 1 + index) for index in range(inputs.size)]
            assert inputs[0] == due[0]
            right = np.cumprod(inputs == due)
            held[sequence] = Held(position, inputs.size, int(right.sum()))
            sampled += [token_at(sequence, position + index) if right[index] else 98 for index in range(inputs.size)]
        if self.next_drafts is not None:
            self.next_drafts.held = held
        self._cache.begin_forward(sequence_ids, np.array(sizes))
        self.log.append(f"launch {step}: {'follow' if follows else 'verify'} {sizes}")
        return cast(PendingSamples, ScriptedSamples(self, step, sampled))

    def foresee(self, sequence_ids: tuple[int, ...], sampling: SampleBatch, positions: np.ndarray) -> None:
        self._cache._growth.foresee(sequence_ids)
        self._foreseen = sequence_ids, sampling, positions

    def step_foreseen(self, sequence_ids: tuple[int, ...], tokens: np.ndarray) -> PendingSamples | None:
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[0] != sequence_ids:
            return None
        return self.step(sequence_ids, tokens, np.full(tokens.size, ON_HOST), *foreseen[1:])

    def takes_prompts(self, num_rows: int, num_sequences: int, num_tokens: int) -> bool:
        return False

    def mark(self) -> None:
        """No prompt is under way."""

    def drain(self) -> None:
        self.log.append("drain")


class ScriptedSamples:
    def __init__(self, runner: ScriptedRunner, step: int, tokens: list[int]) -> None:
        self._runner, self._step, self._tokens = runner, step, tokens

    def is_done(self) -> bool:
        return self._step < self._runner.done_until

    def wait(self) -> Samples:
        assert self.is_done()
        self._runner.log.append(f"read {self._step}")
        if self._runner.fail_reading:
            raise RuntimeError("the device is gone")
        return Samples(np.array(self._tokens), NO_LOGPROBS * len(self._tokens))


class Collector:
    """Stands for TokenFanout."""

    def __init__(self) -> None:
        self.tokens: dict[TokenStream, list[int]] = {}
        self.ends: dict[TokenStream, FinishReason | str] = {}

    def publish(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            assert update.token_stream not in self.ends
            if update.run.token_ids:
                self.tokens.setdefault(update.token_stream, []).extend(update.run.token_ids)
            if update.run.reason != FinishReason.RUNNING:
                self.ends[update.token_stream] = update.run.reason

    def fail(self, token_stream: TokenStream, error: WorkerError) -> None:
        self.ends[token_stream] = str(error)


class Bench:
    """One decode worker's loop, whose sender is the test."""

    def __init__(
        self,
        max_sequences: int = 8,
        runner: type[ScriptedRunner] = ScriptedRunner,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        **limits: Any,
    ) -> None:
        """limits: more of LoopSettings."""
        self.fabric = FakeFabric(2, LAYOUT, num_pages=NUM_PAGES, num_signals=mailbox_rows(8, 2))
        self._sender, receiver = self.fabric.joined()
        self.receiver: FakeTransport = receiver
        self.cache = TvmCache(
            LAYOUT,
            receiver.pools,
            max_sequences=2 * max_sequences,
            max_sequence_length=64,
            rope=RopeParameters("none", 4),
            writer=None,
        )
        self.runner, self.collector = runner(self.cache), Collector()
        self.drafter = drafter
        settings = LoopSettings(lease_seconds=60, sharing=False, max_sequences=max_sequences, **limits)
        ends = Ends(PushMeter(receiver), cast(TokenFanout, self.collector), KernelThreads(None, 1), drafter)
        engine = Engine(self.cache, cast(ModelRunner, self.runner), receiver)
        self.loop = StepLoop(engine, settings, ends, clock)
        self.decodes = self.loop.decodes

    def start(
        self, name: str, max_tokens: int, stop_ids: tuple[int, ...] = (), priority: int = 0, **parameters: Any
    ) -> tuple[Reservation, TokenStream]:
        """A request whose KV and first token have landed."""
        prompt = replace(spec_of([1] * PROMPT), priority=priority)
        reservation = self.decodes.prepare(name, prompt, max_tokens, writer_pe=0)
        sequence, stream = reservation.reservation_id, TokenStream()
        signal = pack_signal(reservation.generation, PROMPT)
        self._sender.post(1, reservation.signal_slot, signal, pack_payload(token_at(sequence, PROMPT), 0))
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop_ids, **parameters)
        self.decodes.start(name, sequence, params, stream)
        return reservation, stream

    def follow(self) -> None:
        """Lets verify steps follow one another from now on."""
        assert self.drafter is not None
        self.runner.next_drafts = ScriptedNextDrafts(self.drafter)

    def run(self) -> None:
        for _ in range(100):
            if self.loop.step() == RECALL_POLL_SECONDS:
                return
        raise AssertionError("the loop does not come to rest")


def expected(sequence: int, count: int) -> list[int]:
    """The tokens that the decode worker itself draws: all but the first."""
    return [token_at(sequence, PROMPT + index) for index in range(1, count)]


def test_the_next_step_is_launched_before_the_tokens_are_read() -> None:
    bench = Bench()
    _, stream = bench.start("a", max_tokens=4)
    bench.run()
    assert bench.runner.log == ["launch 0: [1]", "launch 1: [1]", "read 0", "launch 2: [1]", "read 1", "read 2"]
    assert bench.collector.tokens[stream] == expected(1, 4)
    assert bench.collector.ends[stream] == FinishReason.LENGTH
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_row_that_ends_by_length_is_not_stepped_again() -> None:
    bench = Bench()
    _, short = bench.start("short", max_tokens=2)
    _, long = bench.start("long", max_tokens=5)
    bench.run()
    assert [line for line in bench.runner.log if line.startswith("launch")] == [
        "launch 0: [1, 2]",
        "launch 1: [2]",
        "launch 2: [2]",
        "launch 3: [2]",
    ]
    assert bench.collector.tokens == {short: expected(1, 2), long: expected(2, 5)}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_stop_keeps_the_pages_until_the_step_in_flight_is_done() -> None:
    bench = Bench()
    stop = token_at(1, PROMPT + 2)
    _, stopped = bench.start("stopped", max_tokens=9, stop_ids=(stop,))
    _, other = bench.start("other", max_tokens=6)
    pages = -(-(PROMPT + 9 - 1) // PAGE_SIZE)
    while stopped not in bench.collector.ends:
        bench.loop.step()
    # Step 1 said stop; step 2, with a row for it, is launched and not read.
    assert bench.runner.log[-2:] == ["launch 2: [1, 2]", "read 1"]
    assert bench.collector.ends[stopped] == FinishReason.STOP
    assert 1 in bench.cache._table
    free = bench.cache.num_free_pages
    bench.loop.step()
    assert bench.runner.log[-2:] == ["launch 3: [2]", "read 2"]
    assert 1 not in bench.cache._table
    assert bench.cache.num_free_pages == free + pages
    bench.run()
    assert bench.collector.tokens == {stopped: expected(1, 3), other: expected(2, 6)}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_an_abort_in_flight() -> None:
    bench = Bench()
    _, gone = bench.start("gone", max_tokens=9)
    _, other = bench.start("other", max_tokens=5)
    bench.loop.step()
    bench.loop.step()
    before = list(bench.collector.tokens[gone])
    assert bench.decodes.abort("gone", writer_quiet=True)
    assert not bench.decodes.abort("gone", writer_quiet=True)
    assert 1 in bench.cache._table
    bench.run()
    assert bench.collector.tokens == {gone: before, other: expected(2, 5)}
    assert bench.collector.ends == {gone: FinishReason.ABORT, other: FinishReason.LENGTH}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_an_abort_of_the_only_request_in_flight() -> None:
    bench = Bench()
    bench.start("gone", max_tokens=9)
    bench.loop.step()
    bench.decodes.abort("gone", writer_quiet=True)
    bench.run()
    assert bench.cache.is_empty
    assert bench.cache.num_free_pages == NUM_PAGES


def test_calls_are_answered_while_a_step_computes() -> None:
    """The pages of a request whose last token is on its way stay until that step is done, even if it is aborted."""
    bench = Bench()
    bench.runner.done_until = 0
    _, last = bench.start("last", max_tokens=2)
    _, other = bench.start("other", max_tokens=5)
    pages = -(-(PROMPT + 2 - 1) // PAGE_SIZE)
    for _ in range(5):
        assert bench.loop.step() is not None
    assert bench.runner.log == ["launch 0: [1, 2]", "launch 1: [2]"]
    _, third = bench.start("third", max_tokens=3)
    free = bench.cache.num_free_pages
    assert bench.decodes.abort("last", writer_quiet=True)
    assert bench.collector.ends[last] == FinishReason.ABORT
    assert bench.cache.num_free_pages == free
    bench.runner.done_until = 1
    assert bench.loop.step() == DELIVERY_SECONDS
    assert bench.runner.log[-1] == "read 0"
    assert bench.cache.num_free_pages == free + pages
    bench.runner.done_until = 1000
    bench.run()
    assert bench.collector.tokens == {other: expected(2, 5), third: expected(3, 3)}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_requests_come_and_go_between_steps() -> None:
    """Rows change places from step to step; inputs follow them, from the device or the host."""
    bench = Bench()
    streams = {}
    for number, max_tokens in enumerate((7, 2, 5, 9, 3, 4), start=1):
        stop = (token_at(number, PROMPT + 2),) if number in (3, 4) else ()
        _, streams[number] = bench.start(str(number), max_tokens, stop)
        bench.loop.step()
    bench.run()
    counts = {1: 7, 2: 2, 3: 3, 4: 3, 5: 3, 6: 4}
    assert {n: bench.collector.tokens[s] for n, s in streams.items()} == {n: expected(n, c) for n, c in counts.items()}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_failed_launch_fails_the_batch_and_waits_for_the_step_before() -> None:
    bench = Bench()
    _, first = bench.start("first", max_tokens=9)
    bench.runner.fail_at = lambda step: step == 2
    bench.run()
    assert bench.runner.log == ["launch 0: [1]", "launch 1: [1]", "read 0", "drain"]
    assert bench.collector.ends[first] == "decode of 'first' failed: no luck"
    assert bench.cache.num_free_pages == NUM_PAGES
    bench.runner.fail_at = lambda step: False
    _, second = bench.start("second", max_tokens=3)
    bench.run()
    assert bench.collector.tokens[second] == expected(2, 3)


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_a_step_that_fails_on_the_device_fails_the_batch(max_tokens: int) -> None:
    bench = Bench()
    _, stream = bench.start("a", max_tokens)
    bench.runner.fail_reading = True
    bench.run()
    assert bench.collector.ends[stream] == "decode of 'a' failed: the device is gone"
    assert bench.cache.num_free_pages == NUM_PAGES
