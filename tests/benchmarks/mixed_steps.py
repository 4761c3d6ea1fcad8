"""Decode steps with a prompt chunk beside each, on one GPU, no cluster: one forward for both against two. Prints JSON.

step    wall time of a step without prompts, launched before the tokens of the one before are read
apart   of a step and a forward of the chunk behind it, in CUDA graphs where they fit
one     of one forward of both (ModelRunner.step_with_prompts)
The chunks are those of a prompt of PROMPT tokens. Random weights and KV.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from tandem.workers.runner.model_runner import PromptChunks
from tandem.workers.runner.step_inputs import StepInputs
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.model_shapes import SHAPES
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import print_result
from tests.benchmarks.step_bench import Bench
from tests.support.whole_prompts import compute_prompts

PROMPT = 4096
WARM_STEPS = 3
MOST_STEPS = 16


class MixedBench(Bench):
    def time_steps(self, rows: int, context: int, chunk: int, how: str) -> float:
        """Milliseconds of a step. how: step, apart or one."""
        ids, stored = tuple(range(rows)), np.full(rows, context)
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, context)
            self.cache.finish_receive(sequence)
        sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, PROMPT)

        def launch(step: int, begin: int) -> PendingSamples:
            sources = np.full(rows, -1) if step == 0 else np.arange(rows)
            inputs = StepInputs(np.ones(rows, np.int64), sources, sampling, stored + step)
            prompts = PromptChunks([rows], [tokens[begin : begin + chunk]], [PROMPT + 1])
            if how == "one" and self.runner.takes_prompts(range(rows), 1, chunk):
                return self.runner.step_with_prompts(ids, inputs, prompts)[0]
            pending = self.runner.step(ids, *inputs)
            if how == "apart":
                compute_prompts(self.runner, *prompts, push=False)
            return pending

        def run(first: int, steps: int, launch: Callable[[int, int], PendingSamples]) -> float:
            self.cache.add_sequence(rows)
            began = time.perf_counter()
            flight = launch(first, 0)
            for step in range(1, steps):
                following = launch(first + step, step * chunk)
                flight.wait()
                flight = following
            flight.wait()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            self.cache.remove_sequence(rows)
            return seconds / steps

        steps = min(MOST_STEPS, PROMPT // chunk)
        run(0, min(WARM_STEPS, steps), launch)
        seconds = run(min(WARM_STEPS, steps), steps, launch)
        for sequence in ids:
            self.cache.remove_sequence(sequence)
        return 1e3 * seconds


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", default="qwen3-8b", choices=SHAPES)
    add_list(parser, "--rows", int, default=(16, 64, 92, 128), help="decode rows")
    add_list(parser, "--chunks", int, default=(128, 256, 512, 1024), help="prompt tokens beside them")
    parser.add_argument("--context", type=int, default=1200, help="positions of each row")
    options = parser.parse_args()
    bench = MixedBench(options.model, max(options.rows), max(options.rows) * (options.context + 128) + 2 * PROMPT)
    bench.runner.capture_prompts(8192)
    bench.runner.capture_steps_with_prompts()
    result: dict[str, object] = {}
    for rows in options.rows:
        alone = bench.time_steps(rows, options.context, options.chunks[0], "step")
        for chunk in options.chunks:
            times = {how: bench.time_steps(rows, options.context, chunk, how) for how in ("apart", "one")}
            result[f"{rows} rows, {chunk} tokens"] = {"step": round(alone, 3)} | {
                how: round(each, 3) for how, each in times.items()
            }
    print_result(result, options, gpus=1)


if __name__ == "__main__":
    main()
