"""Measures what pushing KV costs the prefill of a prompt that is alone: Qwen3-8B, 8K tokens, two GPUs. Prints JSON.

The prefill worker of a running 1P1D cluster computes new prompts, in turn with all positions pushed and with one only
(see Pair.prefill); seconds are the worker's own, from the prompt's first forward to the signal behind all writes.

    slowdown   seconds with push ÷ without, median over the rounds        target 1.01
    gb_s       bytes landed ÷ seconds with push
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.pair import Pair, running_cluster
from tests.benchmarks.results import at_most, plot, print_result, print_skipped, rounded

MODEL, LENGTH = "qwen3-8b", 8192
WARM_UP = 3


def measure(pair: Pair, length: int, rounds: int, budget: Budget | None = None) -> dict[str, Any]:
    without, pushing, ratios = [], [], []
    for number in (budget or Budget(None)).within(range(rounds + WARM_UP), least=WARM_UP + 1):
        prompt = pair.prompt(length)
        alone, pushed = pair.prefill(prompt, push=False), pair.prefill(prompt, push=True)
        for run, positions in ((alone, 1), (pushed, length)):
            if run.bytes_pushed != positions * pair.token_bytes:
                raise SystemExit(f"{run.bytes_pushed} bytes were pushed; {positions} positions were asked for")
        if number >= WARM_UP:
            without.append(alone.worker_seconds)
            pushing.append(pushed.worker_seconds)
            ratios.append(pushed.worker_seconds / alone.worker_seconds)
    seconds = Measured.median(pushing)
    return {
        "tokens": length,
        "without_push_ms": Measured.median(without, 1e3),
        "with_push_ms": seconds.scaled(1e3),
        "slowdown": Measured.median(ratios),
        "bytes_landed": length * pair.token_bytes,
        "gb_s": rounded(length * pair.token_bytes / seconds / 1e9),
    }


def result_of(numbers: dict[str, Any], rounds: int) -> dict[str, Any]:
    bars = {"prefill": [numbers["without_push_ms"], numbers["with_push_ms"]]}
    return {
        "rounds": rounds,
        **numbers,
        "targets": [at_most("prefill of 8K with push ÷ without", numbers["slowdown"], 1.01)],
        "plots": [plot("prefill of 8K tokens", "", "ms", ["without push", "with push"], bars)],
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", type=shape_name, choices=list(SHAPES), default=MODEL)
    parser.add_argument("--tokens", type=int, default=LENGTH, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=30)
    add_seconds(parser)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print_skipped("needs two CUDA devices of one host")
        return
    overrides = {"model.max_model_len": options.tokens + 16, "cache.prefix_sharing": False, "scheduler.roles": "split"}
    with tempfile.TemporaryDirectory() as folder:
        shape = write_shape(options.model, Path(folder))
        with (
            running_cluster("gpu-1p1d.yaml", shape, overrides) as cluster,
            Pair(cluster.grpc_address, cluster.worker_token) as pair,
        ):
            numbers = measure(pair, options.tokens, options.rounds, Budget(options.seconds))
    result = result_of(numbers, options.rounds) | {"model": options.model}
    if (options.model, options.tokens) != (MODEL, LENGTH):
        result |= {"case": f"{options.model}, {options.tokens} tokens", "targets": []}
    print_result(result, options, gpus=2)


if __name__ == "__main__":
    main()
