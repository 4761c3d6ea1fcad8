"""With overlap scheduling, chunks of prompts run after decode steps, and nobody waits for them."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tandem.workers.handoff.handoff import RECALL_POLL_SECONDS
from tandem.workers.prefill.prefills import MOST_AHEAD
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.step_time import StepLoad
from tests.support.prompt_specs import spec_of
from tests.support.tvm_cache import TvmCache
from tests.workers.decode.test_overlap_scheduling import (
    NO_LOGPROBS,
    NUM_PAGES,
    PROMPT,
    Bench,
    ScriptedRunner,
    expected,
    token_at,
)

OWN_PE = 1


class PromptRunner(ScriptedRunner):
    """Chunks are done when the test says so."""

    def __init__(self, cache: TvmCache) -> None:
        super().__init__(cache)
        self.chunks_done = 1000  # of those launched
        self.sampling_fails = False
        self.may_wait = False  # whether the host may wait for a prompt
        self._chunks = 0
        self._ending: list[int] = []

    def has_prompt_graph(self, num_sequences: int, num_tokens: int) -> bool:
        return False

    def prompts(self, prompts: PromptChunks, *, push: bool) -> tuple[list[int], None]:
        assert not push
        sequence_ids, chunks, lengths = prompts
        self._cache.begin_forward(sequence_ids, np.array([chunk.size for chunk in chunks]))
        self._chunks += 1
        self.log.append(f"chunk of {sequence_ids}: {[chunk.size for chunk in chunks]}")
        whole = zip(sequence_ids, lengths, strict=True)
        self._ending = [sequence for sequence, length in whole if self._cache.num_tokens(sequence) == length]
        return self._ending, None

    def sample_async(  # type: ignore[override]
        self, logits: list[int], batch: object, positions: np.ndarray, *_: object
    ) -> tuple[Any, PendingSamples]:
        tokens = [token_at(s, int(p)) for s, p in zip(logits, positions, strict=True)]
        return np.array(tokens), cast(PendingSamples, FirstSamples(self, self._chunks, tokens))

    def mark(self) -> Any:  # type: ignore[override]
        last = self._chunks
        return None if last <= self.chunks_done else lambda: last <= self.chunks_done


class FirstSamples:
    def __init__(self, runner: PromptRunner, chunk: int, tokens: list[int]) -> None:
        self._runner, self._chunk, self._tokens = runner, chunk, tokens

    def is_done(self) -> bool:
        return self._chunk <= self._runner.chunks_done

    def wait(self) -> Samples:
        if not self.is_done() and not self._runner.may_wait:
            raise AssertionError("the host waits for a prompt")
        if self._runner.sampling_fails:
            raise RuntimeError("the device is gone")
        return Samples(np.array(self._tokens), NO_LOGPROBS * len(self._tokens))


@pytest.fixture
def bench() -> Bench:
    return Bench(runner=PromptRunner, max_batch_tokens=8)


def runner_of(bench: Bench) -> PromptRunner:
    assert isinstance(bench.runner, PromptRunner)
    return bench.runner


def start_own(
    bench: Bench, name: str, prompt_tokens: int, max_tokens: int, stop: tuple[int, ...] = (), priority: int = 0
) -> TokenStream:
    """A request whose prompt this worker computes. Raises NoRoom."""
    prompt = replace(spec_of([1] * prompt_tokens), priority=priority)
    reservation, stream = bench.decodes.prepare(name, prompt, max_tokens, OWN_PE), TokenStream()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop)
    bench.decodes.start(name, reservation.reservation_id, params, stream)
    return stream


def run(bench: Bench) -> None:
    for _ in range(200):
        if bench.loop.step() == RECALL_POLL_SECONDS:
            return
    raise AssertionError("the loop does not come to rest")


def own(sequence: int, prompt_tokens: int, count: int) -> list[int]:
    return [token_at(sequence, prompt_tokens + index) for index in range(count)]


def test_steps_are_launched_and_read_while_a_chunk_runs(bench: Bench) -> None:
    """The chunk is not done before rows got three more tokens; then its first token comes, and it has a row."""
    _, row = bench.start("row", max_tokens=12)
    for _ in range(2):
        bench.loop.step()
    runner = runner_of(bench)
    runner.chunks_done = 0
    mine = start_own(bench, "own", prompt_tokens=5, max_tokens=3)
    before = len(bench.collector.tokens[row])
    for _ in range(3):
        bench.loop.step()
    assert runner.log.count("chunk of [2]: [5]") == 1
    assert len(bench.collector.tokens[row]) == before + 3
    assert mine not in bench.collector.tokens
    runner.chunks_done = 1
    bench.loop.step()
    assert bench.collector.tokens[mine][0] == token_at(2, 5)
    assert runner.log[-2].endswith("[1, 2]")  # in the very step that saw the first token
    run(bench)
    assert bench.collector.tokens == {row: expected(1, 12), mine: own(2, 5, 3)}
    assert bench.collector.ends == {row: FinishReason.LENGTH, mine: FinishReason.LENGTH}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_first_token_comes_while_a_step_is_read(bench: Bench) -> None:
    _, row = bench.start("row", max_tokens=9)
    bench.loop.step()
    runner = runner_of(bench)
    runner.chunks_done, runner.done_until = 0, 0
    mine = start_own(bench, "own", prompt_tokens=5, max_tokens=2)
    runner.done_until = 1
    bench.loop.step()
    runner.done_until = 0
    bench.loop.step()  # launches the chunk; the step before it is not done
    bench.loop.step()
    assert bench.decodes.is_reading
    runner.chunks_done = 1
    bench.loop.step()
    assert bench.decodes.is_reading
    assert bench.collector.tokens[mine] == own(2, 5, 1)
    runner.done_until = 1000
    run(bench)
    assert bench.collector.tokens == {row: expected(1, 9), mine: own(2, 5, 2)}


@pytest.mark.parametrize("when", ["before its chunk", "while its chunk runs", "when its first token is there"])
def test_an_abort_keeps_the_pages_until_the_device_is_past_them(bench: Bench, when: str) -> None:
    """A peer could be told to write there, and its writes know no order with the chunk."""
    _, row = bench.start("row", max_tokens=20)
    bench.loop.step()
    bench.loop.step()
    runner = runner_of(bench)
    runner.chunks_done = 0
    free = bench.cache.num_free_pages
    mine = start_own(bench, "own", prompt_tokens=7, max_tokens=2)
    if when != "before its chunk":
        bench.loop.step()
    if when == "when its first token is there":
        runner.chunks_done = 1
        bench.loop._retired.settle()
        bench.loop.prefills.poll()
        assert bench.collector.tokens[mine] == own(2, 7, 1)
    assert bench.decodes.abort("own", writer_quiet=False)
    assert bench.collector.ends[mine] == FinishReason.ABORT
    held = when == "while its chunk runs"
    assert bench.cache.num_free_pages == free - 2 * held
    runner.chunks_done = 1000
    run(bench)
    assert bench.collector.tokens[row] == expected(1, 20)
    assert bench.cache.num_free_pages == NUM_PAGES


def test_chunks_do_not_run_far_ahead_of_what_is_awaited(bench: Bench) -> None:
    """A request whose KV is on its way would wait for all of them with its first step."""
    runner = runner_of(bench)
    runner.chunks_done = 0
    reservation = bench.decodes.prepare("awaited", spec_of([1] * PROMPT), 2, writer_pe=0)
    bench.decodes.start(
        "awaited", reservation.reservation_id, SamplingParams(max_tokens=2, temperature=0), TokenStream()
    )
    start_own(bench, "own", prompt_tokens=50, max_tokens=2)
    for _ in range(10):
        bench.loop.step()
    assert len(runner.log) == MOST_AHEAD
    runner.chunks_done = 2
    for _ in range(10):
        bench.loop.step()
    assert len(runner.log) == MOST_AHEAD + 2


def test_a_sampling_that_fails_fails_its_prompts_only(bench: Bench) -> None:
    _, row = bench.start("row", max_tokens=9)
    bench.loop.step()
    runner_of(bench).sampling_fails = True
    mine = start_own(bench, "own", prompt_tokens=5, max_tokens=3)
    run(bench)
    assert bench.collector.ends == {row: FinishReason.LENGTH, mine: "prefill of 'own' failed: the device is gone"}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_step_that_fails_leaves_prompts_alone(bench: Bench) -> None:
    _, row = bench.start("row", max_tokens=9)
    bench.loop.step()
    runner = runner_of(bench)
    runner.fail_at = lambda step: step == 2
    mine = start_own(bench, "own", prompt_tokens=20, max_tokens=1)
    run(bench)
    assert bench.collector.ends == {row: "decode of 'row' failed: no luck", mine: FinishReason.LENGTH}
    assert bench.collector.tokens[mine] == own(2, 20, 1)
    assert bench.cache.num_free_pages == NUM_PAGES


def test_the_scheduler_hears_what_steps_took_and_what_ran_before_them() -> None:
    """Tokens of a step come after the chunks that were launched before it."""
    ticks, told = iter(range(1000)), list[tuple[float, StepLoad]]()
    bench = Bench(runner=PromptRunner, max_batch_tokens=8, clock=lambda: next(ticks) / 10)
    bench.loop.scheduler.pace.measured = lambda seconds, load: told.append((seconds, load))
    _, row = bench.start("row", max_tokens=9)
    bench.loop.step()
    start_own(bench, "own", prompt_tokens=10, max_tokens=1)
    run(bench)
    assert [load.chunk for _, load in told] == [0, 0, 7, 3, *[0] * (len(told) - 4)]
    assert len(told) == len(bench.collector.tokens[row]) - 1  # none before the first, and none after a pause
    assert all(seconds > 0 for seconds, _ in told)
