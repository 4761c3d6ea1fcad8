"""Prefill and decode steps of Qwen3 shapes on one GPU, no cluster, against roofs of the same run; prints JSON.

C: a device copy, bytes read and written a second. F: FLOP a second of an 8192³ bf16 product.

decode: wall time of a step, launched before the tokens of the one before are read, as a decode worker does.
    to_floor    ÷ (weights + KV bytes) / C
    to_roof     ÷ the floor, where products take the longer of weights / C and their FLOP / F
    idle_us     of the profiler's timeline of some more steps: what lies between two steps
    gaps_us     between the kernels of a step
prefill: chunks of 8192 up to the first token, as of a lone prompt on a prefill worker.
    to_product  FLOP, counted with half of the attention square, ÷ time ÷ F
    to_floor    ÷ the FLOP at F or weights / C, what is longer
    to_device   ÷ what all kernels and copies of a prompt take, one after another
to_like: of a mix, ÷ the step of as many rows and positions in all, where the rows are alike.
to_vllm: ÷ the peer's number in results/peers.json, of the same kind of GPU. Random weights and KV.

Under a minute: --model 0.6b --rows 1,8,64 --parts decode. Unlike contexts: --rows 10,64 --contexts mix:one-long
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.contexts import MIXES, Contexts
from tests.benchmarks.model_shapes import SHAPES, shape_name
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.records import read_peer
from tests.benchmarks.results import at_least, at_most, print_result, print_skipped, rounded
from tests.benchmarks.roofs import Roofs, decode_floor, decode_roof, measure_roofs, prefill_floor, prefill_flops
from tests.benchmarks.step_bench import CHUNK, MAX_LENGTH, PAGE_SIZE, STEPS, Bench

MODELS = ("qwen3-8b", "qwen3-0.6b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = Contexts("1024")
LONG = ((1, Contexts("8192")), (1, Contexts("32768")))  # beside ROWS at CONTEXT, where neither is chosen
PROMPTS = (32, 128, 512, 1024, 2048, 8192, 32_768)
PARTS = ("decode", "sampled", "prefill")
SAMPLED_ROWS = 64
LIKE_LIMIT = 1.08
FLOOR_TARGETS = {"qwen3-8b": (1.18, (1, 64, 256)), "qwen3-0.6b": (1.6, (1,))}  # at most, of so many rows at CONTEXT
IDLE_LIMIT_US = 20.0
PREFILL_TARGETS = {"qwen3-8b": (0.85, (8192, 32_768))}

Decode = tuple[int, Contexts]


def decodes_of(rows: Sequence[int] | None, contexts: Sequence[Contexts] | None) -> list[Decode]:
    """Returns the chosen decodes, each number of rows at each of the contexts."""
    chosen = [(each, context) for context in contexts or (CONTEXT,) for each in rows or ROWS]
    return chosen if rows or contexts else [*chosen, *LONG]


def positions_needed(decodes: Sequence[Decode]) -> int:
    """Returns the positions of a cache that holds the largest decode: 1,200 a row and one sequence of MAX_LENGTH, or
    more."""
    ahead = 2 * STEPS + PAGE_SIZE  # warm, timed and recorded steps, and the rest of the last page
    usual = 1200 * max(rows for rows, _ in decodes) + MAX_LENGTH
    return max(usual, *(int((context.lengths(rows) + ahead).sum()) for rows, context in decodes))


def measure_decode(name: str, bench: Bench, decode: Decode, roofs: Roofs) -> dict[str, float | None]:
    rows, context = decode
    lengths, greedy = context.lengths(rows), SamplingParams(temperature=0)
    seconds, unused = bench.decode(lengths, greedy)
    like = bench.decode(context.alike(rows).lengths(rows), greedy)[0] if context.is_mix else None
    theirs = read_peer("steps", f"{name}.{title(decode)}.ms")
    return {
        "ms": seconds.scaled(1e3),
        "to_floor": None if bench.scales else seconds.scaled(1 / decode_floor(bench.config, lengths, roofs)),
        "to_roof": None if bench.scales else seconds.scaled(1 / decode_roof(bench.config, lengths, roofs)),
        "idle_us": round(unused.between, 1),
        "gaps_us": round(unused.inside, 1),
        "to_like": None if like is None else rounded(seconds / like),
        "to_vllm": None if theirs is None else rounded(seconds * 1e3 / theirs),
    }


def title(decode: Decode) -> str:
    rows, context = decode
    return f"decode {rows} at {context}"


def measure_prefill(name: str, bench: Bench, length: int, roofs: Roofs) -> dict[str, float | None]:
    seconds, on_device = bench.prefill(length)
    theirs = read_peer("steps", f"{name}.prefill {length}.ms")
    return {
        "ms": seconds.scaled(1e3),
        "to_floor": seconds.scaled(1 / prefill_floor(bench.config, length, roofs)),
        "to_device": seconds.scaled(1 / on_device),
        "to_product": rounded(prefill_flops(bench.config, length) / seconds / roofs.product),
        "to_vllm": None if theirs is None else rounded(seconds * 1e3 / theirs),
    }


def kv_scales(name: str, kv: str) -> KVScales | None:
    return KVScales.uniform(int(SHAPES[name]["num_hidden_layers"]), 0.02, 0.03) if kv == "fp8" else None


def measure(name: str, roofs: Roofs, options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Measures one model, as far as the budget goes."""
    decodes = decodes_of(options.rows, options.contexts) if "decode" in options.parts else []
    sampled = [(SAMPLED_ROWS, CONTEXT)] if "sampled" in options.parts else []
    most_rows = max((rows for rows, _ in [*decodes, *sampled]), default=1)
    positions = positions_needed([*decodes, *sampled, (1, CONTEXT)])
    bench = Bench(name, most_rows, positions, kv_scales(name, options.kv))
    result: dict[str, Any] = {
        "warm_up_s": round(bench.warm_up_seconds, 2),
        "capture_s": round(bench.capture_seconds, 2),
    }
    for decode in budget.within(decodes):
        result[title(decode)] = measure_decode(name, bench, decode, roofs)
    for rows, context in budget.within(sampled, least=0):
        params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)
        seconds, _ = bench.decode(context.lengths(rows), params)
        result[f"decode {rows} at {context}, sampled, ms"] = seconds.scaled(1e3)
    if "prefill" in options.parts and not budget.is_spent:
        began = time.perf_counter()
        bench.runner.capture_prompts(CHUNK)
        torch.cuda.synchronize()
        result["capture_prompts_s"] = round(time.perf_counter() - began, 2)
        for length in budget.within(sorted(options.prompts)):
            result[f"prefill {length}"] = measure_prefill(name, bench, length, roofs)
    return result


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets of the measured parts. results: measure()'s by model."""
    targets = []
    for name, result in results.items():
        limit, batches = FLOOR_TARGETS.get(name, (0.0, ()))
        for rows in batches:
            if (numbers := result.get(title((rows, CONTEXT)))) is not None:
                targets.append(at_most(f"{name}, decode of {rows} ÷ floor", numbers["to_floor"], limit))
                targets.append(at_most(f"{name}, decode of {rows}, idle µs", numbers["idle_us"], IDLE_LIMIT_US))
        for decode, numbers in result.items():
            if isinstance(numbers, dict) and (ratio := numbers.get("to_like")) is not None:
                targets.append(at_most(f"{name}, {decode} ÷ like contexts", ratio, LIKE_LIMIT))
        least, lengths = PREFILL_TARGETS.get(name, (0.0, ()))
        for length in lengths:
            if (numbers := result.get(f"prefill {length}")) is not None:
                targets.append(at_least(f"{name}, prefill of {length} ÷ product", numbers["to_product"], least))
    return targets


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--model", shape_name, default=MODELS, choices=list(SHAPES), help="qwen3-8b or 8b, …")
    add_list(parser, "--rows", int, help=f"of decode steps; default {','.join(map(str, ROWS))}")
    add_list(parser, "--contexts", Contexts.parse, help=f"positions of a row, or {', '.join(MIXES)}; default {CONTEXT}")
    parser.add_argument("--kv", choices=("bfloat16", "fp8"), default="bfloat16", help="how K and V are stored")
    add_list(parser, "--prompts", int, default=PROMPTS, help=f"in tokens; default {','.join(map(str, PROMPTS))}")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_seconds(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    budget = Budget(options.seconds)
    roofs = measure_roofs()
    results: dict[str, Any] = {}
    for name in budget.within(options.model):
        results[name if options.kv == "bfloat16" else f"{name}, KV in {options.kv}"] = measure(
            name, roofs, options, budget
        )
        torch.cuda.empty_cache()
    roof_numbers = {"copy_gb_per_s": rounded(roofs.copy / 1e9), "product_tflops": rounded(roofs.product / 1e12)}
    device = {"device": torch.cuda.get_device_name()}
    print_result(device | roof_numbers | results | {"targets": targets_of(results)}, options, gpus=1)


if __name__ == "__main__":
    main()
