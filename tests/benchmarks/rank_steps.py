"""Decode steps and prompts of a worker of several ranks, each with a GPU of one host, no cluster; prints JSON.

Random weights and KV. Each number is the slowest rank's. C: a device copy of the same run, bytes read and written a
second. A case is a model with a number of ranks, in processes of its own.

decode: wall time of a step, launched before the tokens of the one before are read.
    sums_ms     of all sums of a step, by themselves in a CUDA graph
    floor_ms    (weights + KV of a rank + its states, read and written) / C + sums_ms; experts: as many as even choices
                make on average. The gathering of logits is left out.
    to_floor    ÷ floor_ms
prefill: wall time to the first token, in chunks of 8,192.
    sums_ms     of all sums of such a forward, by themselves in a CUDA graph
    sums_share  ÷ the time of the prompt
to_one_rank: ÷ the time of one rank in this run, where --ranks has 1.

A part of it: --ranks 2 --rows 1 --prompt 0. Other models: --model qwen3-30b-a3b gpt-oss-120b qwen3-next-8-layers
"""

import argparse
import sys
from contextlib import nullcontext
from functools import partial

import torch

from tandem.workers.ranks.device_ranks import SLOT_BYTES
from tests.benchmarks.device_time import measure_copy
from tests.benchmarks.measured import rounded
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.rank_bench import MODELS, Case, RankBench
from tests.benchmarks.results import Numbers, at_most, guarded, print_result, print_skipped
from tests.benchmarks.step_bench import CHUNK
from tests.gpu.pe_process import PeProcess, pe_processes, together
from tests.gpu.rank_process import meeting

RANKS, ROWS, CONTEXT, PROMPT = (1, 2, 4), (1, 64), 1024, 8192
TARGET_MODEL = "qwen3-8b"
FLOOR_LIMITS = {2: 1.2, 4: 1.3}  # by ranks
PREFILL_LIMITS = {2: 0.58}  # ÷ one rank's


def measure_decode(ranks: list[PeProcess], rows: int, context: int, copy: float) -> Numbers:
    taken = together(ranks, "decode", rows, context)
    seconds = max(each for each, _ in taken)
    sums = seconds_of_sums(ranks, rows)
    floor = max(num_bytes for _, num_bytes in taken) / copy + sums
    return {
        "ms": seconds.scaled(1e3),
        "sums_ms": rounded(sums * 1e3),
        "floor_ms": rounded(floor * 1e3),
        "to_floor": seconds.scaled(1 / floor),
    }


def measure_prefill(ranks: list[PeProcess], length: int) -> Numbers:
    seconds = max(together(ranks, "prefill", length))
    chunks = [min(CHUNK, length - begin) for begin in range(0, length, CHUNK)]
    sums = sum(seconds_of_sums(ranks, tokens) for tokens in chunks)
    return {"ms": seconds.scaled(1e3), "sums_ms": rounded(sums * 1e3), "sums_share": rounded(sums / seconds)}


def seconds_of_sums(ranks: list[PeProcess], tokens: int) -> float:
    return max(together(ranks, "seconds_of_sums", tokens)) if len(ranks) > 1 else 0.0


def measure_case(found: Numbers, case: Case, count: int, options: argparse.Namespace, copy: float) -> Numbers:
    """Fills `found`, so that what was measured before an error stays. Each number is on stderr at once."""

    def note(title: str, numbers: Numbers) -> None:
        found[title] = numbers
        print(f"{case.model}, {titled(count)}, {title}: {numbers}", file=sys.stderr, flush=True)

    with (
        pe_processes(count, RankBench) as ranks,
        meeting(ranks, SLOT_BYTES) if count > 1 else nullcontext(),
    ):
        made, captured = map(max, zip(*together(ranks, "build", case, count), strict=True))
        note("start", {"load_s": rounded(made), "capture_s": rounded(captured)})
        for rows in options.rows:
            note(f"decode {rows}", measure_decode(ranks, rows, case.context, copy))
        if case.prompt:
            note(f"prefill {case.prompt}", measure_prefill(ranks, case.prompt))
        if options.profile:
            print_kernels(ranks, options.rows, case)
    return found


def print_kernels(ranks: list[PeProcess], rows: list[int], case: Case) -> None:
    """Prints the kernels of rank 0 on stderr, for people."""
    for each in rows:
        lines = together(ranks, "step_kernels", each, case.context)[0]
        print(f"{titled(len(ranks))}, {each} rows", *lines, sep="\n", file=sys.stderr, flush=True)
    if case.prompt:
        lines = together(ranks, "prompt_kernels", case.prompt)[0]
        print(f"{titled(len(ranks))}, prompt of {case.prompt}", *lines, sep="\n", file=sys.stderr, flush=True)


def titled(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def compare(results: dict[int, Numbers]) -> None:
    """Adds to_one_rank to what several ranks take. results: of one model, measure_case()'s by ranks."""
    alone = results.get(1, {})
    for count, found in results.items():
        for title in found if count > 1 else ():
            if title.startswith(("decode", "prefill")) and title in alone:
                found[title]["to_one_rank"] = found[title]["ms"].scaled(1 / alone[title]["ms"])


def targets_of(results: dict[int, Numbers]) -> list[Numbers]:
    """results: of TARGET_MODEL, as far as they have been measured, after compare()."""
    targets = []
    for count, found in results.items():
        for rows in ROWS if count in FLOOR_LIMITS else ():
            if (numbers := found.get(f"decode {rows}")) is not None:
                name = f"{TARGET_MODEL}, {count} ranks, decode of {rows} ÷ floor"
                targets.append(at_most(name, numbers["to_floor"], FLOOR_LIMITS[count]))
        ratio = found.get(f"prefill {PROMPT}", {}).get("to_one_rank")
        if ratio is not None and count in PREFILL_LIMITS:
            name = f"{TARGET_MODEL}, {count} ranks, prefill of {PROMPT} ÷ one rank's"
            targets.append(at_most(name, ratio, PREFILL_LIMITS[count]))
    return targets


def measure(options: argparse.Namespace) -> Numbers:
    copy, budget = measure_copy(), Budget(options.seconds)
    torch.cuda.empty_cache()
    by_model: dict[str, dict[int, Numbers]] = {name: {} for name in options.model}
    for name, count in budget.within([(name, count) for name in options.model for count in options.ranks]):
        found: Numbers = {}
        case = Case(name, max(options.rows), options.context, options.prompt)
        failed = guarded(partial(measure_case, found, case, count, options, copy))
        by_model[name][count] = found | failed
    result: Numbers = {"device": torch.cuda.get_device_name(), "copy_gb_per_s": rounded(copy / 1e9)}
    for name, results in by_model.items():
        compare(results)
        result[name] = {titled(count): found for count, found in results.items()}
    usual = options.context == CONTEXT
    return result | {"targets": targets_of(by_model.get(TARGET_MODEL, {})) if usual else []}


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--model", choices=list(MODELS), default=[TARGET_MODEL], help=f"default {TARGET_MODEL}")
    add_list(parser, "--ranks", int, default=RANKS, help="of a worker; left out where there are fewer GPUs")
    add_list(parser, "--rows", int, default=ROWS, help="of decode steps")
    parser.add_argument("--context", type=int, default=CONTEXT, help="positions of a row")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="in tokens; 0: none")
    parser.add_argument("--profile", action="store_true", help="print the kernels of rank 0, the slowest first")
    add_seconds(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    there = torch.cuda.device_count()
    options.ranks = [count for count in options.ranks if count <= there]
    if not options.ranks:
        print_skipped("needs as many CUDA devices of one host as ranks")
        return
    print_result(measure(options), options, gpus=max(options.ranks))


if __name__ == "__main__":
    main()
