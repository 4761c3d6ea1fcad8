"""Verify steps among others: several tokens a step, with steps in flight, and requests that come, stop and go."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.config import SpeculationSettings
from tandem.workers.engine.step import Step
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.scheduling.batch import StepBatch
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.speculation.verification import Verification
from tests.workers.decode.test_overlap_scheduling import NUM_PAGES, PROMPT, Bench, expected, token_at
from tests.workers.scheduling.test_scheduler import prompt

LENGTH = 4


class ScriptedDrafter:
    """Drafts what the script says, up to a wrong token and beyond; nothing where `idle` says so."""

    computes = False

    def __init__(self, right: float, idle: float = 0.0, seed: int = 1) -> None:
        self._seed, self._right, self._idle = seed, right, idle

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return [self._draft(ask) for ask in asks]

    def forget(self, sequence_id: int) -> None:
        pass

    def _draft(self, ask: DraftAsk) -> Int64Array:
        """The same for the same context, but for its length."""
        draws = random.Random(f"{self._seed} {ask.sequence_id} {ask.context.size}")
        size = ask.most
        if self._idle:
            size = 0 if draws.random() < self._idle else min(size, draws.randint(1, 2 * LENGTH))
        due = [token_at(ask.sequence_id, ask.context.size + index) for index in range(size)]
        return np.array([one if draws.random() < self._right else one + 1 for one in due], np.int64)


class EarlyDrafter(ScriptedDrafter):
    """Drafts after contexts of fewer than END tokens alone."""

    END = PROMPT + 10

    def _draft(self, ask: DraftAsk) -> Int64Array:
        return super()._draft(ask)[: 0 if ask.context.size >= self.END else None]


def drafting(drafts: str, seed: int) -> dict[str, Any]:
    """Returns the options of a storm's Bench; none where drafts is "none"."""
    if drafts == "none":
        return {}
    drafter = ScriptedDrafter(right=0.7, idle=0.2, seed=seed)
    return {"drafter": drafter, "speculation": SpeculationSettings("ngram", LENGTH, 32)}


def bench_with(drafter: ScriptedDrafter, max_step_tokens: int = 32) -> Bench:
    settings = SpeculationSettings("ngram", LENGTH, max_step_tokens)
    return Bench(drafter=drafter, speculation=settings)


@pytest.mark.parametrize(
    ("overlaps", "steps"),
    [
        (True, ["[1]", "verify [5]", "verify [5]"]),  # the first was foreseen before there were tokens to draft after
        (False, ["verify [5]", "verify [5]", "[1]"]),
    ],
)
def test_right_drafts_give_their_tokens_in_one_step(overlaps: bool, steps: list[str]) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.runner.overlaps = overlaps
    _, stream = bench.start("a", max_tokens=12)
    bench.run()
    assert [line.split(": ")[1] for line in bench.runner.log if "launch" in line] == steps
    assert bench.collector.tokens[stream] == expected(1, 12)
    assert bench.collector.ends[stream] == FinishReason.LENGTH
    assert bench.cache.num_free_pages == NUM_PAGES


@pytest.mark.parametrize("ending", ["abort", "fails"])
def test_tokens_of_a_verify_step_are_out_before_their_request_ends(ending: str) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.runner.overlaps = False
    _, stream = bench.start("a", max_tokens=12)
    bench.loop.step()
    assert bench.collector.tokens[stream] == expected(1, 6)
    if ending == "abort":
        bench.decodes.abort("a", writer_quiet=True)
    else:
        bench.runner.fail_reading = True
        bench.run()
    assert bench.collector.tokens[stream] == expected(1, 6)
    assert stream in bench.collector.ends


def test_a_stop_in_an_accepted_run_ends_it_there() -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.runner.overlaps = False
    _, stopped = bench.start("stopped", max_tokens=12, stop_ids=(token_at(1, PROMPT + 3),))
    _, other = bench.start("other", max_tokens=9)
    bench.run()
    assert bench.collector.tokens == {stopped: expected(1, 4), other: expected(2, 9)}
    assert bench.collector.ends == {stopped: FinishReason.STOP, other: FinishReason.LENGTH}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_an_abort_while_drafts_are_verified() -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.runner.overlaps, bench.runner.done_until = False, 0
    bench.start("gone", max_tokens=12)
    _, other = bench.start("other", max_tokens=9)
    bench.loop.step()
    assert bench.runner.log == ["launch 0: verify [5, 5]"]
    bench.decodes.abort("gone", writer_quiet=True)
    assert 1 in bench.cache._table, "the step may still write to its pages"
    bench.runner.done_until = 1000
    bench.run()
    assert bench.collector.tokens == {other: expected(2, 9)}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_drafts_share_what_the_rows_leave_of_a_step() -> None:
    bench = bench_with(ScriptedDrafter(right=0), max_step_tokens=6)
    bench.runner.overlaps = False
    streams = [bench.start(name, max_tokens=3)[1] for name in ("a", "b", "c", "d")]
    bench.loop.step()
    assert bench.runner.log[0] == "launch 0: verify [2, 2, 1, 1]"
    bench.run()
    assert bench.collector.tokens == {stream: expected(number, 3) for number, stream in enumerate(streams, start=1)}
    assert bench.cache.num_free_pages == NUM_PAGES


def test_a_verify_step_is_launched_before_the_one_before_is_read() -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.follow()
    _, stream = bench.start("a", max_tokens=20)
    bench.run()
    assert bench.runner.log == [
        *("launch 0: [1]", "read 0", "launch 1: verify [5]", "launch 2: follow [5]", "read 1", "launch 3: follow [5]"),
        *("read 2", "launch 4: follow [3]", "read 3", "read 4"),  # all that it may have
    ]
    assert bench.collector.tokens[stream] == expected(1, 20)
    assert bench.cache.num_free_pages == NUM_PAGES


def test_nothing_follows_drafts_that_are_not_found() -> None:
    """The host notices a step late, because the device cannot tell."""
    bench = bench_with(EarlyDrafter(right=1))
    bench.follow()
    _, stream = bench.start("a", max_tokens=50)
    bench.run()
    launched = [line.split(": ")[1] for line in bench.runner.log if "launch" in line]
    assert launched[:6] == ["[1]", "verify [5]", "follow [5]", "follow [5]", "follow [5]", "[1]"]
    assert bench.decodes._speculation._counters.drafted_tokens == 8
    assert bench.collector.tokens[stream] == expected(1, 50)


def test_a_forward_of_rows_and_prompts_waits_for_a_verify_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.follow()
    _, stream = bench.start("a", max_tokens=40)
    for _ in range(2):
        bench.loop.step()
    assert bench.runner.log[-2:] == ["launch 2: follow [5]", "read 1"]
    steps = bench.loop.meter.steps
    monkeypatch.setattr("tandem.workers.steps.step_loop.is_joint", lambda runner, batch: True)
    joint: list[int] = []

    def compute(batch: StepBatch) -> float:
        joint.append(len(bench.runner.log))
        monkeypatch.undo()
        return 0

    monkeypatch.setattr(bench.loop, "_compute_jointly", compute)
    bench.loop.step()
    assert bench.runner.log[-1] == "read 2"
    assert (joint, bench.loop.meter.steps) == ([], steps)
    bench.loop.step()
    assert len(joint) == 1
    bench.run()
    assert bench.collector.tokens[stream] == expected(1, 40)


def test_a_chunk_beside_verify_steps_is_chosen_with_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.follow()
    bench.start("a", max_tokens=40)
    for _ in range(2):
        bench.loop.step()
    scheduler, told = bench.loop.scheduler, list[tuple[int, ...]]()
    monkeypatch.setattr(scheduler.pace, "chunk_tokens", lambda *asked: told.append(asked) or 64)
    scheduler.add(prompt(2, 900))
    assert list(scheduler.admitted(lambda one: True))
    scheduler.next_batch()
    rows, _, _, drafted = told[0]
    assert (rows, drafted) == (1, 4)


def test_a_step_with_chunks_breaks_the_row_of_steps_that_can_follow() -> None:
    bench = bench_with(ScriptedDrafter(right=0, idle=1))
    bench.follow()
    bench.start("a", max_tokens=60)
    speculation, engine = bench.decodes._speculation, bench.loop.engine
    for _ in range(10):
        bench.loop.step()
    before = speculation._policy._steady
    assert before > 0.8
    for _ in range(20):
        bench.loop.step()
        step = bench.loop.scheduler.rows.next_step()
        if not bench.decodes.is_reading:
            bench.decodes.compute(step, None, lambda step: cast(PendingSamples, engine.launch(Step(step)).rows))
    assert speculation._policy._steady < 0.8 * before


@pytest.mark.parametrize("case", ["rules", "last token", "many rows", "others"])
def test_what_cannot_follow(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.follow()
    for number in range(2):
        penalty = 1.0 if case == "rules" and number else 0.0
        bench.start(str(number), 16, presence_penalty=penalty)
    bench.loop.step()
    decodes = bench.decodes
    rows = decodes._rows
    speculation = decodes._speculation
    step = rows.next_step()
    assert step is not None
    drafts = [np.zeros(4, np.int64)] * len(rows)
    samples = cast(PendingSamples, None)
    before = Verification(rows.requests, [4] * len(rows), drafts, samples, verifier=speculation, rows=rows)
    speculation._last = before
    speculation._policy._plain_steps = 100  # so that any draft pays
    speculation._found = True
    if case == "many rows":
        monkeypatch.setattr(bench.runner.next_drafts, "num_sequences", 1)
    if case == "others":
        before.requests = [*before.requests]
    if case == "last token":
        request = rows.requests[1]
        assert request.rule is not None
        request.rule = replace(request.rule, max_tokens=len(request.output) + 5)
    assert max(len(request.output) for request in rows.requests) + 5 < 16
    assert speculation.follow(rows) is None


@pytest.mark.parametrize("ending", ["abort", "fails"])
def test_pages_wait_for_the_step_that_follows(ending: str) -> None:
    bench = bench_with(ScriptedDrafter(right=1))
    bench.follow()
    _, stream = bench.start("a", max_tokens=40)
    bench.loop.step()
    bench.runner.done_until = 1
    bench.loop.step()
    assert bench.runner.log[-2:] == ["launch 1: verify [5]", "launch 2: follow [5]"]
    if ending == "abort":
        bench.decodes.abort("a", writer_quiet=True)
        assert 1 in bench.cache._table, "the steps may still write to its pages"
    else:
        bench.runner.fail_reading = True
    bench.runner.done_until = 1000
    bench.run()
    assert stream in bench.collector.ends
    assert bench.cache.num_free_pages == NUM_PAGES


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_requests_come_stop_and_go(seed: int, follows: bool) -> None:
    draws = random.Random(seed)
    bench = bench_with(ScriptedDrafter(draws.random(), draws.random(), seed), draws.choice([2, 5, 32]))
    bench.runner.overlaps = follows or draws.random() < 0.7
    if follows:
        bench.follow()
    due: dict[TokenStream, tuple[list[int], FinishReason]] = {}
    gone: set[TokenStream] = set()
    names: dict[str, TokenStream] = {}
    for number in range(1, 13):
        max_tokens = draws.randrange(1, 14)
        end = draws.randrange(2, 16)
        stops = (token_at(number, PROMPT + end - 1),) if draws.random() < 0.5 else ()
        while bench.cache.num_free_pages < 6 or len(bench.decodes._reservations) > 6:
            bench.loop.step()
        _, stream = bench.start(str(number), max_tokens, stops)
        names[str(number)] = stream
        stopped = bool(stops) and end <= max_tokens
        tokens = expected(number, end if stopped else max_tokens)
        due[stream] = tokens, FinishReason.STOP if stopped else FinishReason.LENGTH
        for _ in range(draws.randrange(4)):
            step = sum("launch" in line for line in bench.runner.log)
            bench.runner.done_until = step + draws.randrange(-1, 2)
            bench.loop.step()
        bench.runner.done_until = 1000
        if draws.random() < 0.3:
            victim = draws.choice([*names])
            if names[victim] not in bench.collector.ends:
                bench.decodes.abort(victim, writer_quiet=True)
                gone.add(names[victim])
    bench.run()
    for stream, (tokens, reason) in due.items():
        given = bench.collector.tokens.get(stream, [])
        if stream in gone:
            assert given == tokens[: len(given)]
            assert bench.collector.ends[stream] == FinishReason.ABORT
        else:
            assert (given, bench.collector.ends[stream]) == (tokens, reason)
    assert bench.cache.num_free_pages == NUM_PAGES
    assert not bench.decodes._speculation._policy._requests
