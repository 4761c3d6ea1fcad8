"""Decode steps and prompts of models with FP8 weights beside those of the same shapes in 16 bits, on one GPU."""

import argparse
from typing import Any

import torch

from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.model_shapes import FP8_SUFFIX, SHAPES, shape_name
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_most, print_result, print_skipped
from tests.benchmarks.step_bench import CHUNK, Bench

MODELS = [name.removesuffix(FP8_SUFFIX) for name in SHAPES if name.endswith(FP8_SUFFIX)]
ROWS = (1, 64)
CONTEXT = Contexts("1024")
PROMPT = 8192
TARGETS = {
    "qwen3-8b": {"decode 1": 0.62, "decode 64": 0.75, "prefill 8192": 0.65},
    "qwen3-30b-a3b": {"decode 64": 0.75, "prefill 8192": 0.7},
}


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds, and GiB of the GPU that weights take."""
    bench = Bench(name, max(options.rows), 1200 * max(options.rows) + 2 * PROMPT)
    result = {"weights_gib": round(bench.weight_bytes / (1 << 30), 2)}
    for rows in options.rows:
        seconds, _ = bench.decode(CONTEXT.lengths(rows), SamplingParams(temperature=0))
        result[f"decode {rows}"] = seconds.scaled(1e3)
    if options.prompt:
        bench.runner.capture_prompts(CHUNK)
        seconds, _ = bench.prefill(options.prompt)
        result[f"prefill {options.prompt}"] = seconds.scaled(1e3)
    return result


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--model", shape_name, default=MODELS, choices=MODELS, help="qwen3-8b or 8b, …")
    add_list(parser, "--rows", int, default=ROWS, help="of decode steps")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="in tokens; 0: none")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    targets = []
    for name in options.model:
        both = {form: measure(f"{name}{form}", options) for form in ("", FP8_SUFFIX)}
        torch.cuda.empty_cache()
        ratios = {what: round(both[FP8_SUFFIX][what] / value, 3) for what, value in both[""].items()}
        results[name] = {"bfloat16": both[""], "fp8": both[FP8_SUFFIX], "ratio": ratios}
        print(name, results[name], flush=True)
        targets += [
            at_most(f"{name}, {what}, ÷ bfloat16", ratios[what], limit)
            for what, limit in TARGETS[name].items()
            if what in ratios
        ]
    print_result(results | {"targets": targets}, options, gpus=1)


if __name__ == "__main__":
    main()
