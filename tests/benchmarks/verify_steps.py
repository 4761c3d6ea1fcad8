"""Verify steps of a Qwen3 shape on one GPU, no cluster, against plain steps of the same run; prints JSON.

verify k    a step of each row's last token and k drafted ones, which is read before the next begins
    to_plain    ÷ a plain step of as many rows, launched before the one before is read
    device_ms   what all its kernels and copies take, one after another
with p      tokens a second of rows whose drafts hold with probability p for each token, ÷ those of plain steps. The
            worker's policy decides who gets drafts, and when. p = 0: what a drafter that is always wrong costs. The
            second of two batches; the worker's first has to find p out, and warms up.

Random weights and KV. A drafter's own time is not in it.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.speculation.speculation import Speculation
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.model_shapes import SHAPES, shape_name
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result, print_skipped
from tests.benchmarks.step_bench import RECORDED_STEPS, SEGMENT, STEPS, Bench
from tests.benchmarks.timeline import record
from tests.support.drafted_batch import DraftedBatch, speculation_of

MODELS = ("qwen3-8b",)
ROWS = (1, 2, 4, 8, 16, 32)
DRAFTS = (1, 3, 7)
HOLDS = (0.0, 0.5, 0.7, 0.9)
CONTEXT = 1024
MOST_DRAFTED = 3  # speculation.tokens
MOST_TOKENS = 256  # of a verify step
OUTPUT = 256  # tokens of each row
VERIFY_LIMITS = {(1, 3): 1.15, (1, 7): 1.30}  # by rows and drafted tokens
WRONG_LIMIT = 1 / 1.03
MANY_LIMIT = 1 / 1.02  # of MANY rows
MANY = 32
SPEEDUPS = {1: 2.0, 8: 1.5}  # with drafts of which 0.7 hold
VERIFIED = 0.7


class Generated(NamedTuple):
    """seconds: of OUTPUT tokens a row. tokens: of a row and step. verified: the part of the steps that verified, and
    ms the median of these."""

    seconds: float
    tokens: float
    verified: float
    ms: Measured


class VerifyBench(Bench):
    def __init__(self, shape: str, rows: Sequence[int]) -> None:
        super().__init__(shape, max(rows), max(rows) * (CONTEXT + 2 * OUTPUT))
        began = time.perf_counter()
        self.runner.capture_verification(MOST_TOKENS)
        torch.cuda.synchronize()
        self.capture_verification_seconds = time.perf_counter() - began

    def plain(self, rows: int) -> tuple[Measured, float]:
        """As decode(): seconds of a step. And those of OUTPUT tokens a row."""
        seconds, _ = self.decode(Contexts(str(CONTEXT)).lengths(rows), SamplingParams(temperature=0))
        return seconds, seconds * OUTPUT

    def verify(self, rows: int, drafted: int) -> tuple[Measured, float]:
        """Seconds of a step of which no draft holds, and those that the device works for it."""
        run = _Rows(self, rows)
        tokens = [np.arange(1, drafted + 2)] * rows

        def steps(count: int = STEPS) -> list[float]:
            times = [time.perf_counter()]
            for _ in range(count):
                run.verify(tokens)
                run.take_back([drafted] * rows)
                times.append(time.perf_counter())
            return times

        steps()
        times = steps()
        segments = [(end - begin) / SEGMENT for begin, end in pairwise(times[::SEGMENT])]
        spans = record(lambda: steps(RECORDED_STEPS))
        run.close()
        seconds = Measured.of((times[-1] - times[0]) / STEPS, segments)
        return seconds, sum(span.end - span.begin for span in spans) / 1e6 / RECORDED_STEPS

    def generate(self, rows: int, holds: float, speculation: Speculation) -> "Generated":
        """Until `rows` have OUTPUT tokens on average. holds: the probability of a drafted token to be the target's."""
        run = _Rows(self, rows)
        batch = DraftedBatch(speculation, rows, 2 * OUTPUT, lambda sequence: holds)
        outputs = steps = 0
        verifying: list[float] = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        flight: PendingSamples | None = None
        while outputs < OUTPUT * rows:
            steps += 1
            drafted = batch.propose()
            following = run.step(flight is not None) if drafted is None else None
            if flight is not None:
                flight.wait()
            flight = following
            verified = time.perf_counter()
            if drafted is not None:
                run.verify([np.arange(1, count + 2) for count in drafted])
            accepted = batch.step(drafted)
            if drafted is not None:
                run.take_back([count - good for count, good in zip(drafted, accepted, strict=True)])
                verifying.append(time.perf_counter() - verified)
            outputs += rows + sum(accepted)
        if flight is not None:
            flight.wait()
        seconds = time.perf_counter() - began
        run.close()
        each = outputs / rows
        return Generated(
            seconds * OUTPUT / each, each / steps, len(verifying) / steps, Measured.median(verifying or [0.0], 1e3)
        )


class _Rows:
    """Sequences of CONTEXT positions, until close()."""

    def __init__(self, bench: VerifyBench, rows: int) -> None:
        self._bench = bench
        self.ids = tuple(range(rows))
        self._sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        for sequence in self.ids:
            bench.cache.add_sequence(sequence)
            bench.cache.prepare_receive(sequence, CONTEXT)
            bench.cache.finish_receive(sequence)

    def _positions(self) -> Int64Array:
        return np.array([self._bench.cache.num_tokens(sequence) + 1 for sequence in self.ids])

    def step(self, follows: bool) -> PendingSamples:
        """One that takes the tokens of the one before, if it follows one that was not read."""
        rows = len(self.ids)
        sources = np.arange(rows) if follows else np.full(rows, -1)
        return self._bench.runner.step(self.ids, np.ones(rows, np.int64), sources, self._sampling, self._positions())

    def verify(self, tokens: Sequence[Int64Array]) -> None:
        self._bench.runner.verify(self.ids, tokens, self._sampling, self._positions()).wait()

    def take_back(self, counts: Sequence[int]) -> None:
        if any(counts):
            self._bench.cache.pop_each(self.ids, counts)

    def close(self) -> None:
        torch.cuda.synchronize()
        for sequence in self.ids:
            self._bench.cache.remove_sequence(sequence)


def measure(name: str, options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Of one model, as far as the budget goes."""
    bench = VerifyBench(name, options.rows)
    result: dict[str, Any] = {"capture_s": round(bench.capture_verification_seconds, 2)}
    for rows in budget.within(options.rows):
        plain, plain_output = bench.plain(rows)
        numbers: dict[str, float] = {"plain_ms": plain.scaled(1e3)}
        result[title(rows)] = numbers
        for drafted in options.drafts:
            if rows * (drafted + 1) <= MOST_TOKENS:
                seconds, on_device = bench.verify(rows, drafted)
                numbers[f"verify {drafted}, ms"] = seconds.scaled(1e3)
                numbers[f"verify {drafted}, device_ms"] = rounded(on_device * 1e3)
                numbers[f"verify {drafted}, to_plain"] = seconds.scaled(1 / plain)
        for holds in options.holds:
            speculation = speculation_of(MOST_DRAFTED, MOST_TOKENS)
            first, made = (bench.generate(rows, holds, speculation) for _ in range(2))
            numbers[f"with {holds}, first of the worker, to_plain"] = rounded(plain_output / first.seconds)
            numbers[f"with {holds}, to_plain"] = rounded(plain_output / made.seconds)
            numbers[f"with {holds}, tokens a step"] = rounded(made.tokens)
            numbers[f"with {holds}, part of steps that verify"] = rounded(made.verified)
            numbers[f"with {holds}, ms of these"] = made.ms
    return result


def title(rows: int) -> str:
    return f"rows {rows}"


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Of measure()'s results by model."""
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
