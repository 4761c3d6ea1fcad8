"""Decode attention of sequences with a common prefix on one GPU, each page read once for all against once for each.

64 sequences, 8192 common positions and 256 of each one's own, heads of Qwen3-8B; prints JSON. All ways run in CUDA
graphs of 36 layers, so that launches cost alike.

plain: each sequence reads the shared pages by itself, from the L2 cache as far as they fit. copies: each has pages of
its own, as without prefix sharing. by_common: other lengths of what is common, and two levels. step: whole decode steps
of Qwen3-8B with random weights.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.shared_prefixes import SharingRule, find_shared_prefixes
from tandem.cache.plan.tables import lay_out_tokens, look_up_pages
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, print_result, print_skipped, rounded
from tests.benchmarks.step_bench import PAGE_SIZE, STEPS, Bench

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
LAYERS, CALLS = 4, 36  # of the pool, and in a graph
ROWS, COMMON, OWN = 64, 8192, 256
OTHERS = ((64, 512), (64, 1024), (8, 4096), (8, 8192), (2, 32768))  # rows, common
PARTS = ("attention", "by_common", "step")
MODEL = "qwen3-8b"
DTYPE = torch.bfloat16
ALWAYS = SharingRule(1, 1)


class Case:
    """`batch` sequences on shuffled pages, the first common // PAGE_SIZE of which they share."""

    def __init__(self, batch: int, common: int, own: int, *, copies: bool = False, halves: int = 0) -> None:
        """copies: nothing is shared after all. halves: positions that each half of the sequences shares besides."""
        shared, both = common // PAGE_SIZE, halves // PAGE_SIZE
        table = np.arange(batch * (shared + both + -(-(own + 1) // PAGE_SIZE)), dtype=np.int32).reshape(batch, -1)
        if not copies:
            table[:, :shared] = table[0, :shared]
            for half in np.split(np.arange(batch), 2) if both else ():
                table[half, shared : shared + both] = table[half[0], shared : shared + both]
        used, places = np.unique(table, return_inverse=True)
        ids = np.random.default_rng(0).permutation(used.size).astype(np.int32)
        table, common = ids[places].reshape(table.shape), common + halves
        self.tokens = lay_out_tokens(np.full(batch, common + own), np.ones(batch, np.int64))
        rows = np.arange(batch)
        self.plain = look_up_pages(table, rows, self.tokens, PAGE_SIZE)
        limits = np.full(batch, (common + own) // PAGE_SIZE)
        self.shared = replace(self.plain, shared=find_shared_prefixes(table, rows, limits, ALWAYS))
        pool = torch.randn((ids.size, LAYERS, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype=DTYPE, device="cuda")
        self.kernels = choose_kernels(pool, Scoring(HEAD_DIM**-0.5))
        rows_of_all = torch.randn(batch, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.qkv = rows_of_all.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)

    def attend(self, plan: Any) -> Tensor:
        q, k, v = self.qkv
        q = q.contiguous()
        return [self.kernels.attend(call % LAYERS, q, k, v, plan) for call in range(CALLS)][-1]

    def seconds(self, shared: bool) -> tuple[Measured, Tensor]:
        """Returns the seconds of a layer's attention, and its last output."""
        plan = self.kernels.plan(self.tokens, self.shared if shared else self.plain)
        output = self.attend(plan)  # FlashInfer plans here, outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.attend(plan)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(12):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / CALLS / 1e3)
        return Measured.median(times), output

    def measure(self) -> dict[str, float]:
        plain, expected = self.seconds(shared=False)
        shared, actual = self.seconds(shared=True)
        return {
            "plain_us": plain.scaled(1e6),
            "shared_us": shared.scaled(1e6),
            "plain_to_shared": rounded(plain / shared),
            "largest_difference": float((actual.float() - expected.float()).abs().max()),
        }


def step_seconds(bench: Bench, sequences: np.ndarray, common: int) -> float:
    """Wall time of a decode step, as in steps.py; sequences have grown by OWN positions after what they share."""
    for sequence in sequences.tolist():
        bench.cache.prepare_receive(sequence, OWN)
        bench.cache.finish_receive(sequence)
    sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * sequences.size)
    ones, positions = np.ones(sequences.size, np.int64), np.full(sequences.size, common + OWN + 1)
    step = partial(bench.runner.step, tuple(sequences.tolist()), ones)
    flight = step(np.full(sequences.size, -1), sampling, positions)
    began = time.perf_counter()
    for number in range(STEPS + 5):
        if number == 5:
            began = time.perf_counter()
        following = step(np.arange(sequences.size), sampling, positions + number + 1)
        flight.wait()
        flight = following
    seconds = (time.perf_counter() - began) / STEPS
    flight.wait()
    return seconds


def measure_steps(rows: int, common: int) -> dict[str, float]:
    bench = Bench(MODEL, rows + 1, (rows + 2) * (common + 2 * OWN))
    cache, sequences = bench.cache, np.arange(1, rows + 1)
    cache.add_sequence(0)
    cache.prepare_receive(0, common)
    cache.finish_receive(0)
    seconds: dict[str, float] = {}
    for way in ("shared", "plain", "copies"):
        for sequence in sequences.tolist():
            if way == "copies":
                cache.add_sequence(sequence)
                cache.prepare_receive(sequence, common)
                cache.finish_receive(sequence)
            else:
                cache.fork_sequence(0, sequence)
        graphs = bench.runner._graphs
        assert graphs is not None
        if way == "plain":
            graphs._graphs._sharing = None
        seconds[way] = step_seconds(bench, sequences, common)
        for sequence in sequences.tolist():
            cache.remove_sequence(sequence)
    return {
        **{f"{way}_ms": rounded(of * 1e3) for way, of in seconds.items()},
        "plain_to_shared": rounded(seconds["plain"] / seconds["shared"]),
        "copies_to_shared": rounded(seconds["copies"] / seconds["shared"]),
    }


def measure_attention(rows: int, common: int) -> dict[str, float]:
    found = Case(rows, common, OWN).measure()
    copies, _ = Case(rows, common, OWN, copies=True).seconds(shared=False)
    return found | {"copies_us": copies.scaled(1e6), "copies_to_shared": rounded(copies * 1e6 / found["shared_us"])}


def measure(options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    rows, common, found = options.rows, options.common, dict[str, Any]()
    with torch.inference_mode():
        if "attention" in options.parts:
            found[f"{rows} sequences, {common} common"] = measure_attention(rows, common)
        if "by_common" in options.parts:
            others = {
                f"{batch} sequences, {length} common": Case(batch, length, OWN).measure()
                for batch, length in budget.within(OTHERS)
            }
            if not budget.is_spent:
                others["64 sequences, 4096 common, 2048 of each half"] = Case(64, 4096, OWN, halves=2048).measure()
            found["by_common"] = others
    torch.cuda.empty_cache()
    if "step" in options.parts and not budget.is_spent:
        found["step"] = measure_steps(rows, common)
    return found


def targets_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    targets = []
    if (attention := found.get(f"{ROWS} sequences, {COMMON} common")) is not None:
        targets.append(at_least("attention, plain ÷ shared", attention["plain_to_shared"], 3.0))
    if (step := found.get("step")) is not None:
        targets.append(at_least("decode step, copies ÷ shared", step["copies_to_shared"], 3.0))
    return targets


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences")
    parser.add_argument("--common", type=int, default=COMMON, help="positions that they have in common")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_seconds(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    found = measure(options, Budget(options.seconds))
    usual = (options.rows, options.common) == (ROWS, COMMON)
    result = {"device": torch.cuda.get_device_name(), **found, "targets": targets_of(found) if usual else []}
    if not usual:
        result["case"] = f"{options.rows} rows, {options.common} common"
    print_result(result, options, gpus=1)


if __name__ == "__main__":
    main()
