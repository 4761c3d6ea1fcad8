"""Measures what separate prefill and decode cost first tokens, on two GPUs, unloaded, through gRPC. Prints JSON.

In every round a new prompt takes two ways, which take turns to be first, and numbers are medians over the rounds:

    local      one worker: the client calls the prefill worker itself, which computes the prompt, samples, and answers,
               and pushes one position only. The same process, GPU, weights and kernels, without gateway,
               reservation and push: less to do than any server around one worker has, so that ratios to it are strict
    pd         a request through the gateway: reservation, prefill with push, first token; then decode

    ttft_ratio   pd's first token ÷ local − 1                 target 0.01 from 8K tokens up; at 1K 2 ms in all
    handoff      pd's second token − local, less one decode step: prefill's token time + decode's first token − one
                 engine's first token, of which a decode step is work           target 1.5 ms
    second_gap   from pd's first to its second token ÷ a decode step            target 2

A decode step is the mean time between the tokens after the second. Where the first token's extra time goes:

    reservation            at the gateway, from the request's arrival to the decode worker's answer; the prefill worker
                           has begun by then
    prefill_less_local     at the prefill worker, from the first forward to the signal: what the push costs
    gateway_less_prefill   at the gateway, from the request's arrival to the first token, less that prefill, which lasts
                           until all has landed: below 0 where the token is sooner
    client                 what the client saw less what the gateway saw

Under a minute: --models qwen3-8b --lengths 1024 8192 --rounds 4
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import Pair, Prefill, Request, running_cluster
from tests.benchmarks.results import at_most, plot, print_result, print_skipped

CASES = {"qwen3-8b": (1024, 8192, 32_768), "qwen3-0.6b": (8192,)}
OUTPUT_TOKENS = 32
MAX_LENGTH = 33_792
LONG = 8192  # from here on the ratio counts, below it milliseconds
WARM_UP = 2
REST_SECONDS = 0.2


def measure(pair: Pair, length: int, rounds: int, budget: Budget | None = None) -> dict[str, float]:
    """Milliseconds, and ratios of one round."""
    columns: dict[str, list[float]] = {}
    for number in (budget or Budget(None)).within(range(rounds + WARM_UP), least=WARM_UP + 1):
        local, pd = _both_ways(pair, length, pd_first=number % 2 == 1)
        if number >= WARM_UP:
            for name, value in one_round(local, pd).items():
                columns.setdefault(name, []).append(value)
    return {name: Measured.median(values) for name, values in columns.items()}


def one_round(local: Prefill, pd: Request) -> dict[str, float]:
    times, timings = pd.arrivals, pd.timings
    step = (times[-1] - times[1]) / (len(times) - 2)
    return {
        "local_ms": local.seconds * 1e3,
        "ttft_ms": times[0] * 1e3,
        "ttft_less_local_ms": (times[0] - local.seconds) * 1e3,
        "ttft_ratio": times[0] / local.seconds - 1,
        "reservation_ms": timings.queue_seconds * 1e3,
        "prefill_less_local_ms": (timings.prefill_seconds - local.worker_seconds) * 1e3,
        "gateway_less_prefill_ms": (timings.first_token_seconds - timings.prefill_seconds) * 1e3,
        "client_ms": (times[0] - timings.first_token_seconds) * 1e3,
        "decode_step_ms": step * 1e3,
        "second_gap_ms": (times[1] - times[0]) * 1e3,
        "second_gap_to_step": (times[1] - times[0]) / step,
        "handoff_ms": (times[1] - local.seconds) * 1e3,
        "handoff_less_step_ms": (times[1] - local.seconds - step) * 1e3,
    }


def _both_ways(pair: Pair, length: int, pd_first: bool) -> tuple[Prefill, Request]:
    prompt = pair.prompt(length)
    if pd_first:
        _heat(pair, length)
        pd = pair.request(prompt, OUTPUT_TOKENS)
        _heat(pair, length)
        return pair.prefill(prompt, push=False), pd
    _heat(pair, length)
    local = pair.prefill(prompt, push=False)
    _heat(pair, length)
    return local, pair.request(prompt, OUTPUT_TOKENS)


def _heat(pair: Pair, length: int) -> None:
    """A rest, then a prefill nobody times: a GPU that has rested runs some percent faster, one that has computed one
    prompt after another some percent slower, and both ways need the same past."""
    time.sleep(REST_SECONDS)
    pair.prefill(pair.prompt(length), push=False)


def targets(model: str, length: int, numbers: dict[str, float]) -> list[dict[str, Any]]:
    case = f"{model} {length // 1024}K"
    first = (
        at_most(f"{case}: first token ÷ local − 1", numbers["ttft_ratio"], 0.01)
        if length >= LONG
        else at_most(f"{case}: first token − local, ms", numbers["ttft_less_local_ms"], 2.0)
    )
    return [
        first,
        at_most(f"{case}: handoff − decode step, ms", numbers["handoff_less_step_ms"], 1.5),
        at_most(f"{case}: second token's gap ÷ decode step", numbers["second_gap_to_step"], 2.0),
    ]


def measure_model(
    address: str, worker_token: str, lengths: Sequence[int], rounds: int, budget: Budget
) -> dict[int, dict[str, float]]:
    with Pair(address, worker_token) as pair:
        return {length: measure(pair, length, rounds, budget) for length in budget.within(lengths)}


def result_of(found: dict[str, dict[int, dict[str, float]]], rounds: int) -> dict[str, Any]:
    cases = [(model, length, numbers) for model, part in found.items() for length, numbers in part.items()]
    names = [f"{model} {length // 1024}K" for model, length, _ in cases]
    series = {name: [numbers[f"{name}_ms"] for _, _, numbers in cases] for name in ("local", "ttft")}
    overhead = {
        "first token − local": [numbers["ttft_less_local_ms"] for _, _, numbers in cases],
        "handoff": [numbers["handoff_ms"] for _, _, numbers in cases],
        "decode step": [numbers["decode_step_ms"] for _, _, numbers in cases],
    }
    return {
        "rounds": rounds,
        "models": found,
        "targets": [target for case in cases for target in targets(*case)],
        "plots": [
            plot("time to first token", "", "ms", names, series),
            plot("what disaggregation adds", "", "ms", names, overhead),
        ],
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    add_list(parser, "--models", shape_name, default=list(CASES), choices=list(SHAPES))
    add_list(parser, "--lengths", int, help="of prompts, up to 32768; by default each model has its own")
    parser.add_argument("--transport", choices=("nvshmem", "nixl"), default="nvshmem", help="nixl: as between hosts")
    add_seconds(parser)
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print_skipped("needs two CUDA devices of one host")
        return
    found, budget = {}, Budget(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        for model in budget.within(options.models):
            lengths = options.lengths or CASES.get(model, (LONG,))
            overrides = {"model.max_model_len": MAX_LENGTH, "cache.prefix_sharing": False, "scheduler.roles": "split"}
            overrides["island.transport"] = options.transport
            with running_cluster("gpu-1p1d.yaml", write_shape(model, Path(folder)), overrides) as cluster:
                address, token = cluster.grpc_address, cluster.worker_token
                found[model] = measure_model(address, token, lengths, options.rounds, budget)
    print_result(result_of(found, options.rounds), options, gpus=2)


if __name__ == "__main__":
    main()
