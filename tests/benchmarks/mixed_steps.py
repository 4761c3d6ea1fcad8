"""Decode steps with a prompt chunk beside each, on one GPU, no cluster: one forward for both against two. Prints JSON.

step    wall time of a step without prompts, launched before the tokens of the one before are read
apart   of a step and a forward of the chunk behind it, in CUDA graphs where they fit
one     of one forward of both (ModelRunner.step_with_prompts)
limit   1.2 × the longer of a step's products and of reading its weights, and reading the KV of its rows, by this
        device's own roofs
The chunks are those of a prompt of PROMPT tokens. Random weights and KV.

--orders measures `one` with other orders of a layer's two attentions, too (mixed_orders.py), in turns, and only sizes
that have graphs of their own. --profile prints what the kernels of one such step take.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.runner.mixed_graphs import MixedGraphs
from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import StepInputs
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.mixed_orders import ORDERS, in_order
from tests.benchmarks.model_shapes import SHAPES
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.benchmarks.roofs import kv_seconds, measure_roofs, product_weights
from tests.benchmarks.step_bench import Bench
from tests.benchmarks.timeline import Span, record
from tests.support.whole_prompts import compute_prompts

PROMPT = 4096
WARM_STEPS = 3
MOST_STEPS = 16
ALLOWED = 1.2  # times the products
NAME, KERNELS = 64, 18  # characters of a kernel's, and how many kernels

PROFILED = ("joined", "beside", "stored first, prompts first, rows wait")

Run = Callable[[int, int, str], float]


class MixedBench(Bench):
    def time_steps(self, rows: int, context: int, chunk: int, how: str) -> float:
        """Milliseconds of a step. how: step, apart or one."""
        steps = min(MOST_STEPS, PROMPT // chunk)
        times: list[float] = []
        self._with_rows(rows, context, lambda run: times.append(run(steps, chunk, how)))
        return 1e3 * times[0]

    def profile(self, rows: int, context: int, chunk: int) -> tuple[dict[str, float], list[str]]:
        """µs that the kernels of one joint step take, the longest first, of MOST_STEPS / 4 steps."""
        steps, spans = MOST_STEPS // 4, list[Span]()
        self._with_rows(rows, context, lambda run: spans.extend(record(lambda: run(steps, chunk, "one"))))
        return by_kernel(spans, steps)

    def limit(self, rows: int, context: int, chunk: int) -> float:
        """Milliseconds, see above."""
        roofs, weights = self.roofs, product_weights(self.config)
        products = max(2 * weights * (rows + chunk) / roofs.product, weights * self.config.dtype.itemsize / roofs.copy)
        kv = kv_seconds(self.config, np.full(rows, context), roofs)
        return 1e3 * (ALLOWED * products + kv)

    def measure(self) -> None:
        """The device's roofs."""
        self.roofs = measure_roofs()

    def capture(self, order: str, rows: Sequence[int], chunks: Sequence[int]) -> MixedGraphs:
        """Graphs of steps with prompts, of these sizes alone, in one of ORDERS."""
        graphs = self.runner._graphs
        assert graphs is not None
        with in_order(order):
            self.runner.capture_prompts(max(chunks))
            prompts = self.runner._prompt_graphs
            assert prompts is not None
            graphs.capture_with_prompts([one for one in prompts.buffers if one.size in chunks], GraphCapture())
        assert graphs._mixed is not None
        return graphs._mixed

    def use(self, mixed: MixedGraphs) -> None:
        """Makes these graphs compute steps with prompts from now on."""
        assert self.runner._graphs is not None
        self.runner._graphs._mixed = mixed

    def _with_rows(self, rows: int, context: int, measure: Callable[[Run], object]) -> None:
        """measure gets a call of (steps, tokens of a chunk, how): seconds of a step; warm steps come first."""
        ids, stored = tuple(range(rows)), np.full(rows, context)
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, context)
            self.cache.finish_receive(sequence)
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, PROMPT)
        done = 0

        def launch(first: bool, begin: int, chunk: int, how: str) -> PendingSamples:
            nonlocal done
            sources = np.full(rows, -1) if first else np.arange(rows)
            inputs = StepInputs(np.ones(rows, np.int64), sources, sampling, stored + done)
            done += 1
            prompts = PromptChunks([rows], [tokens[begin : begin + chunk]], [PROMPT + 1])
            if how == "one" and self.runner.takes_prompts(range(rows), 1, chunk):
                return self.runner.step_with_prompts(ids, inputs, prompts)[0]
            pending = self.runner.step(ids, *inputs)
            if how == "apart":
                compute_prompts(self.runner, *prompts, push=False)
            return pending

        def run(steps: int, chunk: int, how: str) -> float:
            self.cache.add_sequence(rows)
            began = time.perf_counter()
            flight = launch(True, 0, chunk, how)
            for step in range(1, steps):
                following = launch(False, step * chunk, chunk, how)
                flight.wait()
                flight = following
            flight.wait()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            self.cache.remove_sequence(rows)
            return seconds / steps

        def warm_run(steps: int, chunk: int, how: str) -> float:
            run(min(WARM_STEPS, steps), chunk, how)
            return run(steps, chunk, how)

        measure(warm_run)
        for sequence in ids:
            self.cache.remove_sequence(sequence)


def by_kernel(spans: Sequence[Span], steps: int) -> tuple[dict[str, float], list[str]]:
    """Sums up a step in µs: wall, from its first kernel to its last; busy, in which some ran; together, in which two
    did. Then lists the kernels. WARM_STEPS come before the steps."""
    first = sorted(one.begin for one in spans if one.name == "_fetch")
    spans = sorted((one for one in spans if one.begin >= first[min(WARM_STEPS, steps)]), key=lambda one: one.begin)
    times, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    busy, end = 0.0, spans[0].begin
    for one in spans:
        times[one.name[:NAME]] += one.end - one.begin
        counts[one.name[:NAME]] += 1
        busy += max(0.0, one.end - max(one.begin, end))
        end = max(end, one.end)
    lines = [
        f"{times[name] / steps:8.1f} µs  {counts[name] / steps:6.1f} ×  {name}"
        for name in sorted(times, key=lambda name: -times[name])[:KERNELS]
    ]
    total = sum(times.values())
    sums = {"wall": end - spans[0].begin, "busy": busy, "kernels": total, "together": total - busy}
    return {name: round(value / steps, 1) for name, value in sums.items()}, lines


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=SHAPES)
    add_list(parser, "--rows", int, default=(16, 64, 92, 128), help="decode rows")
    add_list(parser, "--chunks", int, default=(128, 256, 512, 1024), help="prompt tokens beside them")
    parser.add_argument("--context", type=int, default=1200, help="positions of each row")
    parser.add_argument("--orders", action="store_true", help="compare orders of a layer's attentions")
    parser.add_argument("--rounds", type=int, default=3, help="of --orders")
    add_list(parser, "--profile", int, default=(), help="rows and tokens of a step whose kernels are printed")
    options = parser.parse_args()
    bench = MixedBench(options.model, max(options.rows), max(options.rows) * (options.context + 128) + 2 * PROMPT)
    bench.measure()
    if options.orders:
        print_result(compare(bench, options.rows, options.chunks, options.context, options.rounds, options.profile))
        return
    bench.runner.capture_prompts(8192)
    bench.runner.capture_steps_with_prompts()
    result: dict[str, object] = {}
    for rows in options.rows:
        alone = bench.time_steps(rows, options.context, options.chunks[0], "step")
        for chunk in options.chunks:
            times = {how: bench.time_steps(rows, options.context, chunk, how) for how in ("apart", "one")}
            times["limit"] = bench.limit(rows, options.context, chunk)
            result[f"{rows} rows, {chunk} tokens"] = {"step": round(alone, 3)} | {
                how: round(each, 3) for how, each in times.items()
            }
    if options.profile:
        rows, chunk = options.profile
        result["profile"] = bench.profile(rows, options.context, chunk)
    print_result(result, options, gpus=1)


def compare(
    bench: MixedBench, rows: Sequence[int], chunks: Sequence[int], context: int, rounds: int, profiled: Sequence[int]
) -> dict[str, object]:
    """Profiles of one size, then milliseconds of each order, medians of `rounds`, by size. Prints each as it comes."""
    captured = {order: bench.capture(order, rows, chunks) for order in ORDERS}
    result: dict[str, object] = {}
    for order in PROFILED if profiled else ():
        bench.use(captured[order])
        sums, lines = result[f"profile, {order}"] = bench.profile(profiled[0], context, profiled[1])
        print(f"{order}: {sums}", *lines, sep="\n", flush=True)
    print("sizes:", ", ".join(("limit", *(f"{order!r}" for order in ORDERS))), flush=True)
    for count in rows:
        for chunk in chunks:
            times = defaultdict[str, list[float]](list)
            for _ in range(rounds):
                for order, mixed in captured.items():
                    bench.use(mixed)
                    times[order].append(bench.time_steps(count, context, chunk, "one"))
            line = {"limit": round(bench.limit(count, context, chunk), 3)}
            line |= {order: round(median(each), 3) for order, each in times.items()}
            result[f"{count} rows, {chunk} tokens"] = line
            print(f"{count} rows, {chunk} tokens:", *line.values(), flush=True)
    return result


if __name__ == "__main__":
    main()
