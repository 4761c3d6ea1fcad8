"""Verify steps of a Qwen3 shape on one GPU, no cluster, against plain steps of the same run; prints JSON.

A decode worker's loop, its step thread and the n-gram drafter are real. The model's weights are random, but for its
embedding: behind token t it says t + 1. So a prompt decides what is drafted, and how much of it holds.

verify k    a step of each row's last token and k drafted ones, none of which holds
    to_plain    ÷ a plain step of as many rows
    waiting     the same, where each step is read before the next is launched
    device_ms   what all its kernels and copies take, one after another
with p      tokens a second of rows whose drafts hold with probability p for each token, ÷ those of plain steps. The
            worker's policy decides who gets drafts, and when. p = 0: what a drafter that is always wrong costs.
            Behind the worker's first batch, which has to find p out, and warms up; of LEAST_ROWS rows or more.
eagle3      the same with an EAGLE-3 head of random weights, whose tokens others replace that hold with probability p
    no draft    a step in which the head takes part, ÷ one of the target alone
"""

import argparse
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.completion import pack_payload, pack_signal
from tandem.transfer.recall import mailbox_rows
from tandem.workers.config import LoopSettings, SpeculationSettings
from tandem.workers.decode.kernel_threads import KernelThreads
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import WorkerError
from tandem.workers.kernels.base import Entered, EnteringRows
from tandem.workers.prefill.push_meter import PushMeter
from tandem.workers.requests.token_stream import TokenFanout, TokenStream, TokenUpdate
from tandem.workers.runner import model_runner
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.draft_length import DraftLength
from tandem.workers.speculation.draft_policy import DraftPolicy
from tandem.workers.speculation.drafter import DraftAsk, Drafter
from tandem.workers.speculation.model_drafter import ModelDrafter
from tandem.workers.speculation.ngram import NgramDrafter
from tandem.workers.steps.step_loop import Ends, StepLoop
from tandem.workers.steps.step_thread import StepThread
from tests.benchmarks.counting_prompts import (
    CONTEXT,
    FIRST_TOKEN,
    FIRST_WRONG,
    MOST_DRAFTED,
    OUTPUT,
    SCALE,
    TOKENS_A_ROW,
    prompts_of,
)
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.model_shapes import SHAPES, shape_name
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result, print_skipped
from tests.benchmarks.step_bench import RECORDED_STEPS, Bench
from tests.benchmarks.timeline import record
from tests.support.fake_transport import FakeFabric
from tests.support.prompt_specs import spec_of

MODELS = ("qwen3-8b",)
ROWS = (1, 2, 4, 8, 16, 32)
DRAFTS = (1, 3, 7)
HOLDS = (0.0, 0.5, 0.7, 0.9)
NGRAM, EAGLE3 = "ngram", "eagle3"
MOST_TOKENS = 256  # of a verify step
SECONDS = 20.0  # that a batch may take
LEAST_ROWS = 8  # in one batch or several
VERIFY_LIMITS = {(1, 3): 1.15, (1, 7): 1.30}  # by rows and drafted tokens
WRONG_LIMIT = 1 / 1.03
MANY_LIMIT = 1 / 1.02  # of MANY rows
MANY = 32
SPEEDUPS = {1: 2.0, 8: 1.5}  # with drafts of which 0.7 hold
VERIFIED = 0.7
MAILBOX = KVLayout((LayerGroup((0,), KV(1, 4)),), 16, torch.float32)  # of a fabric for signals
Made = tuple[StepLoop, StepThread, Any]  # see VerifyBench.loop


class Generated(NamedTuple):
    """The figures of OUTPUT tokens a row on average. ms: of a step. accepted: part of the drafted tokens."""

    seconds: float
    ms: Measured
    tokens_a_step: float
    accepted: float

    @classmethod
    def mean(cls, batches: Sequence["Generated"]) -> "Generated":
        ms = Measured.median([one.ms for one in batches]) if len(batches) > 1 else batches[0].ms
        seconds, tokens, accepted = (np.mean([one[field] for one in batches]).item() for field in (0, 2, 3))
        return cls(seconds, ms, tokens, accepted)


class Collected:
    """Stands for TokenFanout: counts tokens, and says when there are enough."""

    def __init__(self, enough: int) -> None:
        self.tokens, self._enough, self.done = 0, enough, threading.Event()
        self.times: list[float] = []
        self._last: dict[TokenStream, int] = {}
        self.error: Exception | None = None

    def publish(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            for token in update.run.token_ids:
                if token != self._last.get(update.token_stream, token - 1) + 1:
                    self.error = AssertionError(f"{token} behind {self._last[update.token_stream]}")
                self._last[update.token_stream] = token
                self.tokens += 1
        if updates and not self.done.is_set():
            self.times.append(time.perf_counter())
        if self.tokens >= self._enough:
            self.done.set()

    def fail(self, token_stream: TokenStream, error: WorkerError) -> None:
        self.error = error
        self.done.set()


class Overruled:
    """Stands for a trained head: asks that of the runner, and drafts other tokens in place of its own."""

    computes = True

    def __init__(self, drafter: Drafter, holds: float) -> None:
        """holds: the probability of a drafted token to be the target's, where the one before is."""
        self._drafter = drafter
        self._holds = holds
        self._draws = np.random.default_rng(0)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        drafts = self._drafter.propose(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            right = np.logical_and.accumulate(self._draws.random(draft.size) < self._holds)
            draft[:] = np.where(right, ask.context[-1] + 1 + np.arange(draft.size), FIRST_WRONG)
        return drafts

    def forget(self, sequence_id: int) -> None:
        self._drafter.forget(sequence_id)


class OverruledOnDevice(NextDrafts):
    """Overruled, for drafts that stay on the device."""

    holds = wrong = torch.zeros(())  # on the device, for graphs

    def enter(self, rows: EnteringRows, number: int, ahead: int) -> Entered:
        entered = super().enter(rows, number, ahead)
        self._right = entered.tokens + 1
        return entered

    def put(self, sources: Tensor, number: int, drafted: Tensor) -> None:
        is_right = torch.rand(drafted.shape, device=drafted.device) < OverruledOnDevice.holds
        torch.where(is_right, self._right, OverruledOnDevice.wrong, out=drafted)
        super().put(sources, number, drafted)


class VerifyBench(Bench):
    def __init__(self, shape: str, rows: Sequence[int], method: str = NGRAM) -> None:
        self._method = method
        OverruledOnDevice.holds = torch.zeros((), device="cuda")
        OverruledOnDevice.wrong = torch.tensor(FIRST_WRONG, device="cuda")
        num_tokens = 2 * max(rows) * (CONTEXT + 3 * OUTPUT)
        super().__init__(shape, max(rows), num_tokens, speculation=SpeculationSettings(method))
        decoder = cast(Any, self.target)
        following = decoder._lm_head._weights.weight.roll(-1, 0)  # of the next token
        decoder._embedding.tensor().copy_(following.float() * SCALE)
        began = time.perf_counter()
        with mock.patch.object(model_runner, "NextDrafts", NextDrafts if method == NGRAM else OverruledOnDevice):
            self.runner.capture_verification(MOST_TOKENS, max_ngram=1 if method == NGRAM else 0)
        self.runner.capture_drafts(max(rows), MOST_DRAFTED)
        torch.cuda.synchronize()
        self.capture_verification_seconds = time.perf_counter() - began

    @contextmanager
    def loop(self, rows: int, drafted: int, holds: float = 0.0) -> Iterator[Made]:
        """Makes the loop of a decode worker, and the peer that signals its KV. drafted: most tokens of a draft; 0: no
        drafter. holds: see Overruled; prompt lookup's follows from the prompts."""
        fabric = FakeFabric(2, MAILBOX, num_pages=1, num_signals=mailbox_rows(rows, 2))
        sender, receiver = fabric.joined()
        speculation = SpeculationSettings(self._method, drafted, MOST_TOKENS, 1)
        settings = LoopSettings(lease_seconds=600, sharing=False, max_sequences=rows, speculation=speculation)
        fanout = cast(TokenFanout, Collected(0))
        drafter: Drafter | None = None
        engine = Engine(self.cache, self.runner, receiver)
        OverruledOnDevice.holds.fill_(holds)
        if drafted:
            drafter = NgramDrafter(1) if self._method == NGRAM else Overruled(ModelDrafter(engine), holds)
        ends = Ends(PushMeter(receiver), fanout, KernelThreads(None, 1), drafter)
        loop = StepLoop(engine, settings, ends)
        thread = StepThread(loop, "steps")
        thread.start()
        try:
            yield loop, thread, sender
        finally:
            thread.stop()
            torch.cuda.synchronize()

    def generate(self, made: Made, rows: int, holds: float, most: int) -> Generated:
        """Until `rows` have OUTPUT tokens on average. holds: the probability of a drafted token to be the target's."""
        loop, thread, sender = made
        collected = Collected(rows * OUTPUT)
        prompts = prompts_of(rows, holds, most)
        before = loop.counters.drafted_tokens, loop.counters.accepted_tokens

        def start() -> None:
            cast(Any, loop.decodes)._fanout = collected
            limit = CONTEXT // (most + 1)
            for row, prompt in enumerate(prompts):
                reservation = loop.decodes.prepare(str(row), spec_of(prompt), limit, writer_pe=0)
                signal = pack_signal(reservation.generation, CONTEXT)
                first = FIRST_TOKEN + row * TOKENS_A_ROW
                sender.post(1, reservation.signal_slot, signal, pack_payload(first, 0))
                params = SamplingParams(temperature=0, max_tokens=limit)
                loop.decodes.start(str(row), reservation.reservation_id, params, TokenStream())

        def end() -> None:
            for row in range(rows):
                loop.decodes.abort(str(row), writer_quiet=True)

        torch.cuda.synchronize()
        began = time.perf_counter()
        thread.call(start).result(SECONDS)
        assert collected.done.wait(SECONDS), "the batch takes too long"
        thread.call(end).result(SECONDS)
        while thread.call(lambda: bool(cast(Any, loop.decodes)._steps)).result(SECONDS):
            pass  # a step that is not read yet has the sequences
        if collected.error is not None:
            raise collected.error
        drafted, accepted = (
            now - then
            for now, then in zip((loop.counters.drafted_tokens, loop.counters.accepted_tokens), before, strict=True)
        )
        times = np.array([began, *collected.times])
        return Generated(
            float(times[-1] - began) * rows * OUTPUT / collected.tokens,
            Measured.median(np.diff(times)[2:].tolist(), 1e3),
            collected.tokens / rows / len(collected.times),
            accepted / max(drafted, 1),
        )

    def generate_batches(self, made: Made, rows: int, holds: float) -> tuple[Generated, Generated]:
        """The worker's first batch, and those behind it."""
        batches = [self.generate(made, rows, holds, MOST_DRAFTED) for _ in range(1 + -(-LEAST_ROWS // rows))]
        return batches[0], Generated.mean(batches[1:])

    def verify(self, rows: int, drafted: int, *, follows: bool) -> Measured:
        """Milliseconds of a step in which each row has so many drafted tokens, none of which holds."""
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(mock.patch.object(DraftLength, "next", return_value=drafted))
            enter(mock.patch.object(DraftPolicy, "pays", lambda self, requests, counts: bool(counts)))
            if not follows:
                enter(mock.patch.object(self.runner, "next_drafts", None))
            made = enter(self.loop(rows, drafted))
            return [self.generate(made, rows, 0.0, drafted) for _ in range(2)][1].ms

    def undrafted(self, rows: int) -> Measured:
        """Milliseconds of a step in which a head takes part, and no row has a draft."""
        with ExitStack() as stack:
            for asked in ("pays", "gives_up"):
                stack.enter_context(mock.patch.object(DraftPolicy, asked, return_value=False))
            made = stack.enter_context(self.loop(rows, MOST_DRAFTED))
            return [self.generate(made, rows, 0.0, MOST_DRAFTED) for _ in range(2)][1].ms

    def on_device(self, rows: int, drafted: int) -> float:
        """Seconds that the device works for a step."""
        ids, tokens = tuple(range(rows)), [np.arange(1, drafted + 2)] * rows
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, CONTEXT)
            self.cache.finish_receive(sequence)

        def steps(count: int) -> None:
            for _ in range(count):
                positions = np.array([self.cache.sequence(sequence).num_tokens + 1 for sequence in ids])
                self.runner.verify(ids, tokens, sampling, positions).wait()
                self.cache.pop_each(ids, [drafted] * rows)

        steps(3)
        spans = record(lambda: steps(RECORDED_STEPS))
        torch.cuda.synchronize()
        for sequence in ids:
            self.cache.remove_sequence(sequence)
        return sum(span.end - span.begin for span in spans) / 1e6 / RECORDED_STEPS


def measure(name: str, options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Measures one model, as far as the budget goes."""
    result, plain = measure_ngram(VerifyBench(name, options.rows), options, budget)
    torch.cuda.empty_cache()
    if EAGLE3 in options.drafters:
        result[EAGLE3] = measure_eagle3(VerifyBench(name, options.rows, EAGLE3), plain, options, budget)
    return result


def measure_eagle3(
    bench: VerifyBench, plain: Mapping[int, Generated], options: argparse.Namespace, budget: Budget
) -> dict[str, Any]:
    """plain: by rows, of steps without the head."""
    result: dict[str, Any] = {}
    for rows in budget.within(plain):
        result[title(rows)] = {"no draft, to_plain": rounded(bench.undrafted(rows) / plain[rows].ms)}
        for holds in options.holds:
            with bench.loop(rows, MOST_DRAFTED, holds) as made:
                _, drafting = bench.generate_batches(made, rows, 0.0)
            result[title(rows)] |= numbers_of(drafting, plain[rows], holds)
    return result


def numbers_of(drafting: Generated, plain: Generated, holds: float) -> dict[str, Any]:
    return {
        f"with {holds}, to_plain": rounded(plain.seconds / drafting.seconds),
        f"with {holds}, tokens a step": rounded(drafting.tokens_a_step),
        f"with {holds}, part of drafted tokens accepted": rounded(drafting.accepted),
        f"with {holds}, ms of a step": drafting.ms,
    }


def measure_ngram(
    bench: VerifyBench, options: argparse.Namespace, budget: Budget
) -> tuple[dict[str, Any], dict[int, Generated]]:
    """Returns the result, and plain steps by rows."""
    without: dict[int, Generated] = {}
    result: dict[str, Any] = {"capture_s": round(bench.capture_verification_seconds, 2)}
    for rows in budget.within(options.rows):
        with bench.loop(rows, 0) as made:
            plain = without[rows] = [bench.generate(made, rows, 0.0, MOST_DRAFTED) for _ in range(2)][1]
        numbers: dict[str, Any] = {"plain_ms": plain.ms}
        result[title(rows)] = numbers
        for drafted in options.drafts:
            if rows * (drafted + 1) <= MOST_TOKENS:
                numbers[f"verify {drafted}, device_ms"] = rounded(bench.on_device(rows, drafted) * 1e3)
                for kind, follows in (("", True), ("waiting, ", False)):
                    ms = bench.verify(rows, drafted, follows=follows)
                    numbers[f"verify {drafted}, {kind}ms"] = ms
                    numbers[f"verify {drafted}, {kind}to_plain"] = rounded(ms / plain.ms)
        for holds in options.holds:
            with bench.loop(rows, MOST_DRAFTED) as made:
                first, drafting = bench.generate_batches(made, rows, holds)
            numbers[f"with {holds}, first of the worker, to_plain"] = rounded(plain.seconds / first.seconds)
            numbers |= numbers_of(drafting, plain, holds)
    return result, without


def title(rows: int) -> str:
    return f"rows {rows}"


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets. results: measure()'s by model."""
    targets = []
    for name, result in results.items():
        for (rows, drafted), limit in VERIFY_LIMITS.items():
            if (ratio := result.get(title(rows), {}).get(f"verify {drafted}, to_plain")) is not None:
                targets.append(at_most(f"{name}, verify of {drafted}, {rows} row ÷ plain step", ratio, limit))
        for rows, limit in SPEEDUPS.items():
            if (ratio := result.get(title(rows), {}).get(f"with {VERIFIED}, to_plain")) is not None:
                targets.append(at_least(f"{name}, {rows} rows, {VERIFIED} of drafts hold ÷ plain", ratio, limit))
        for rows in ROWS:
            if (ratio := result.get(title(rows), {}).get("with 0.0, to_plain")) is not None:
                limit = MANY_LIMIT if rows >= MANY else WRONG_LIMIT
                targets.append(at_least(f"{name}, {rows} rows, no draft holds ÷ plain", ratio, rounded(limit)))
    return targets


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--model", shape_name, default=MODELS, choices=list(SHAPES), help="qwen3-8b or 8b, …")
    add_list(parser, "--rows", int, default=ROWS, help="sequences of a step")
    add_list(parser, "--drafts", int, default=DRAFTS, help="drafted tokens of a row")
    add_list(parser, "--drafters", str, default=(NGRAM,), choices=(NGRAM, EAGLE3), help="ngram, which all have; eagle3")
    add_list(parser, "--holds", float, default=HOLDS, help="probability of a drafted token to be the target's")
    add_seconds(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    budget = Budget(options.seconds)
    results: dict[str, Any] = {}
    for name in budget.within(options.model):
        results[name] = measure(name, options, budget)
        torch.cuda.empty_cache()
    device = {"device": torch.cuda.get_device_name()}
    print_result(device | results | {"targets": targets_of(results)}, options, gpus=1)


if __name__ == "__main__":
    main()
