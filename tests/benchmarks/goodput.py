"""Goodput: requests a second within a service level, of tandem and vLLM, beside what the roofs allow. Prints JSON.

It starts a cluster for each of --roles, with random weights in a model's shape, and loads it open-loop as
`tandem bench serve` does, by the same code. Every target gets the same requests of a mix at the same rate. With --vllm
running servers get them in turns; with --vllm-site it starts one on each GPU afterwards, and ends them.

For each mix (docs/benchmarking.md has them), target and rate:

    arrived_rps              measured requests ÷ the time in which they were sent
    shares                   of requests that kept both limits: the first token's, and that of the p90, or of the mean,
                             of the request's gaps; a failed request keeps none
    first_token_p50_ms …     from the call to the first message with tokens; gaps are those of all requests
    token_ms                 mean over requests: from the first token to the last ÷ tokens but the first. Where drafts
                             hold, a message brings several tokens, and is one gap: then this is the mean gap of a token
    output_tokens_s          that came while measured requests arrived
    late_p99_ms, busy        of the load generator: how late it sent, and how much of a core its busiest process took

    goodput                  by each rule, the rate at which 90 % of the requests keep it, between two measured rates by
                             interpolation; at_least and below name the last and the first rate where there are no two
    limit_rps                `goodput_roof` in roofs.py, times the GPUs: products and copies at the speed of this
                             device, weights read once a step, KV once, steps as long as the gap's limit; to_limit:
                             goodput ÷ it

With --speculation each method gets a cluster of its own, beside one that drafts nothing, with the same requests. The
model is that of drafted_models.py, of whose drafted tokens --holds hold, and temperature is 1. Each rate has

    drafted, accepted        tokens, and the part of them that held
    messages_tokens          tokens a message
    token_to_off             token_ms ÷ that of the cluster without drafts; goodput_to_off likewise, below 1 for a loss

With --reserved-output each fraction gets a cluster of its own, with the same requests. --pool-tokens bounds a worker's
pages. --asked-tokens is the max_tokens of all requests, as of clients that send one number always: the benchmark ends
each request where its drawn output ends.

Requests to tandem name a target for their first token: --deadlines times the limit of their mix. --token-share of a
sequence's tokens should come within the limit of gaps.

Rates are the same for all mixes (--rates 4 8) or by mix (--rates A=18.5:23.3 B=2:4). By default they are 0.45, 0.6 and
0.75 of the limit. Without a GPU it runs a tiny model and the mix `laptop`.

On two GPUs: --mixes A A2 B C --roles adaptive takes about 5 minutes; each rate of a mix takes about --window + 8 s.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.cluster.errors import BenchmarkFailed, UsageError
from tandem.cluster.tools.bench.generators import Generators
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.load import Load, PartOutcome
from tandem.cluster.tools.bench.measures import Numbers
from tandem.cluster.tools.bench.mixes import MIXES, Mix, Slo
from tandem.cluster.tools.bench.open_target import open_target
from tandem.cluster.tools.bench.report import one_line
from tandem.cluster.tools.bench.serve import Bench, Run
from tandem.cluster.tools.bench.settings import VOCABULARY, LoadOptions
from tandem.cluster.tools.bench.targets import Refused, Served, TargetSpec
from tandem.cluster.tools.bench.timeline import Timeline
from tandem.cluster.tools.bench.workload import Workload
from tandem.workers.models.registry import load_config
from tests.benchmarks.drafted_models import write_drafter, write_target
from tests.benchmarks.measured import rounded
from tests.benchmarks.model_shapes import COMMON, SHAPES, add_tokenizer, shape_name, write_shape, write_tiny
from tests.benchmarks.mtp import AIR, AIR_CUT, HYBRID
from tests.benchmarks.mtp import TINY as TINY_AIR
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import print_result
from tests.benchmarks.roofs import Roofs, goodput_roof, measure_roofs
from tests.benchmarks.vllm_servers import SHIPPED, running_vllm

CONFIGS = {0: "local.yaml", 1: "gpu-1.yaml", 2: "gpu-1p1d.yaml", 4: "gpu-2p2d.yaml"}
ROLES = ("adaptive", "colocated", "split")
METHODS = ("ngram", "draft_model", "mtp", "eagle3")
PAGE_SIZE = 16  # with --pool-tokens
PARKED_BYTES = 8 << 30
OFF = "off"  # in place of a method
TINY = "tiny"
EIGHT_LAYERS = {"num_hidden_layers": 8}  # of the tiny model with drafts: an EAGLE-3 head takes the inputs of three
PARTS_OF_LIMIT = (0.45, 0.6, 0.75)
DRAWN = 20_000  # lengths, of which the limit takes the mean
BUSY = 0.3  # of a core, from which on a process of the generator delays what it reads
MOST_PROCESSES = 12


@dataclass(frozen=True)
class Plan:
    """The loads of each target. rates: by mix, requests a second."""

    mixes: tuple[str, ...]
    rates: dict[str, list[float]]
    gaps: tuple[float, ...]  # ms; none: the mix's own
    options: LoadOptions
    sweep_seconds: float | None  # None: the rates, no sweep
    processes: int
    seed: int
    vocab_size: int  # token ids of prompts are below it

    def slos(self, mix: str) -> list[Slo]:
        slo = MIXES[mix].slo
        return [replace(slo, gap_ms=gap) for gap in self.gaps] or [slo]


class Whole:
    """Makes loads to their ends, for a rule that a sweep does not follow needs all requests, too; keeps what came."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outcomes: list[PartOutcome] = []

    async def __call__(self, load: Load, most_missed: int | None) -> PartOutcome:
        self.outcomes.append(await self._run(load, None))
        return self.outcomes[-1]


def shares_of(timelines: Sequence[Timeline], slos: Sequence[Slo]) -> dict[str, float]:
    """Returns the fraction of requests that keep each rule."""
    return {
        f"{rule} gap {slo.gap_ms:g} ms": rounded(
            sum(one.meets(slo, mean_gap=rule == "mean") for one in timelines) / max(1, len(timelines))
        )
        for slo in slos
        for rule in ("p90", "mean")
    }


def goodput_of(rates: Sequence[float], shares: Sequence[float], fraction: float) -> dict[str, float]:
    """rps: where the share falls below `fraction` for the first time, on the line between two rates.

    at_least: the highest rate, if no share is below; below: the lowest one, if its share is.
    """
    points = sorted(zip(rates, shares, strict=True))
    missed = next((number for number, (_, share) in enumerate(points) if share < fraction), None)
    if missed is None:
        return {"at_least": points[-1][0]}
    if missed == 0:
        return {"below": points[0][0]}
    (low, kept), (high, lost) = points[missed - 1], points[missed]
    return {"rps": rounded(low + (high - low) * (kept - fraction) / (kept - lost))}


def numbers_of(numbers: Numbers, timelines: Sequence[Timeline], slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns the numbers to report for one load."""
    sent = [one.sent for one in timelines]
    seconds = max(sent) - min(sent) if len(sent) > 1 else 0.0
    told: dict[str, Any] = {
        "arrived_rps": rounded((len(sent) - 1) / seconds) if seconds else 0.0,
        "requests": len(timelines),
        "failed": numbers["failed"],
        "shares": shares_of(timelines, slos),
    }
    told |= {f"first_token_{name}_ms": rounded(numbers[f"{name}_ttft_ms"]) for name in ("p50", "p90")}
    told |= {f"gap_{name}_ms": rounded(numbers[f"{name}_itl_ms"]) for name in ("mean", "p50", "p90", "p99")}
    told |= {
        "token_ms": rounded(numbers["mean_tpot_ms"]),
        "output_tokens_s": rounded(numbers["steady_output_throughput"]),
        "late_p99_ms": rounded(numbers["p99_late_ms"]),
        "busy": rounded(numbers["generator_busy"]),
    }
    if drafted := numbers["total_drafted_tokens"]:
        told |= {"drafted": drafted, "accepted": rounded(numbers["total_accepted_tokens"] / drafted)}
        told["messages_tokens"] = rounded(numbers["tokens_per_message"])
    warnings = list(numbers["warnings"])
    if numbers["generator_busy"] > BUSY:
        warnings.append(f"a process of the generator took {numbers['generator_busy']:.2f} of a core, more than {BUSY}")
    return told | ({"warnings": warnings} if warnings else {})


async def measure_mix(generators: Generators, name: str, plan: Plan, served: Served) -> dict[str, Any]:
    """Loads of one mix on one target: its numbers by rate, and the goodput."""
    mix, slos = MIXES[name], plan.slos(name)
    seed = plan.seed * len(MIXES) + list(MIXES).index(name)  # no two mixes have a prompt in common
    workload = Workload(mix.prompts, mix.outputs, plan.vocab_size, seed=seed, most_tokens=served.max_model_len)
    workload.check()
    run = Whole(generators.run)
    options = replace(plan.options, burstiness=mix.burstiness)
    bench = Bench(run, workload, slos[0], options, lambda one: print(one_line(one), file=sys.stderr, flush=True))
    if plan.sweep_seconds is not None:
        await bench.sweep(plan.rates[name][0], 0.1, plan.sweep_seconds)
    else:
        for rate in plan.rates[name]:
            await bench.at_rate(rate)
    runs: dict[float, dict[str, Any]] = {}
    for numbers, outcome in zip(bench.runs, run.outcomes, strict=True):
        runs[numbers["request_rate"]] = numbers_of(numbers, outcome.timelines, slos)
    shares = {rule: [one["shares"][rule] for one in runs.values()] for rule in shares_of([], slos)}
    goodput = {rule: goodput_of(list(runs), kept, mix.slo.fraction) for rule, kept in shares.items() if kept}
    result = {"rates": {f"{rate:.4g}": one for rate, one in sorted(runs.items())}, "goodput": goodput}
    print(f"{name}: {json.dumps(result)}", file=sys.stderr, flush=True)  # for who ends the benchmark early
    return result


async def measure_target(
    spec: TargetSpec, plan: Plan, budget: Budget, deadlines: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Measures a target by mix. deadlines: see the option. Raises BenchmarkFailed if the target does not describe
    itself."""
    async with aclosing(open_target(spec)) as target:
        try:
            served = await target.served()
        except Refused as error:
            raise BenchmarkFailed(f"{', '.join(spec.urls) or spec.grpc}: {error}") from None
    found = {}
    for name in budget.within(plan.mixes):
        target = deadlines * MIXES[name].slo.ttft_ms / 1e3 or None
        asked = replace(spec, model=served.model, first_token_seconds=target)
        async with Generators(plan.processes, asked) as generators:
            found[name] = await measure_mix(generators, name, plan, served)
    return found


@contextmanager
def tandem_targets(
    given: argparse.Namespace, model: Path, roles: str, more: dict[str, Any]
) -> Iterator[dict[str, TargetSpec]]:
    """Yields a cluster's targets by frontend, until the context ends. more: keys of its configuration."""
    overrides: dict[str, Any] = {"scheduler.roles": roles, "gateway.http_port": 0}
    if roles != "split":  # whose workers compute no prompts beside rows
        overrides["scheduler.token_share"] = given.token_share
    overrides["model.max_model_len"] = max(_longest(MIXES[name]) for name in given.mixes)
    spec = TargetSpec()
    if given.pool_tokens:
        overrides |= {"cache.num_pages": given.pool_tokens // PAGE_SIZE, "cache.page_size": PAGE_SIZE}
    if given.asked_tokens:
        spec = replace(spec, asked_tokens=given.asked_tokens)
        overrides["model.max_model_len"] += given.asked_tokens
    overrides |= more
    if given.speculation:
        overrides["model.load_format"] = "safetensors"
        spec = replace(spec, temperature=1.0)
    with running_cluster(CONFIGS[given.gpus], model, overrides) as cluster:
        specs = {  # a salt each: no frontend finds prefixes of the other
            "grpc": replace(spec, grpc=cluster.grpc_address, salt="grpc"),
            "http": replace(spec, urls=(f"http://{cluster.http_address}",), salt="http"),
        }
        yield {name: specs[name] for name in given.frontends}


def variants(given: argparse.Namespace, model: Path) -> dict[str, dict[str, Any]]:
    """The keys of a cluster's configuration by the variant's name, "" where nothing is compared. Writes drafters."""
    if given.reserved_output:
        parked = {"cache.parked_bytes": PARKED_BYTES}
        return {
            f"reserved {part:g}": {"scheduler.reserved_output": part} | (parked if part < 1 else {})
            for part in given.reserved_output
        }
    if not given.speculation:
        return {"": {}}
    more = {"speculation.max_step_tokens": given.step_tokens, "speculation.tokens": given.draft_tokens}
    return {OFF: {}} | {
        method: write_drafter(method, model, model.parent, given.holds) | more for method in given.speculation
    }


def measure_all(given: argparse.Namespace, model: Path, logs: Path, plan: Plan) -> dict[str, dict[str, Any]]:
    """Measures by target, then by mix. Clusters and servers run one after the other, for they need the GPUs to
    themselves."""
    found: dict[str, dict[str, Any]] = {}
    budget = Budget(given.seconds)
    if given.vllm:
        found["vllm"] = asyncio.run(measure_target(TargetSpec(urls=tuple(given.vllm)), plan, budget))
    clusters = [(roles, *one) for roles in given.roles for one in variants(given, model).items()]
    for roles, variant, more in budget.within(clusters):
        began, title = time.perf_counter(), f"{roles} {variant}".strip()
        with tandem_targets(given, model, roles, more) as targets:
            print(f"{title}: ready after {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            for frontend, spec in targets.items():
                found[f"{title} {frontend}"] = asyncio.run(measure_target(spec, plan, budget, given.deadlines))
    for variant in budget.within(given.vllm_tokens if given.vllm_site else ()):
        with running_vllm(given.vllm_site, model, variant, max(1, given.gpus), logs) as urls:
            found[f"vllm {variant}"] = asyncio.run(measure_target(TargetSpec(urls=tuple(urls)), plan, budget))
    return found


def limit_of(mix: Mix, model: Path, roofs: Roofs, gpus: int) -> float:
    """Requests a second of all GPUs together."""
    generator = np.random.default_rng(0)

    def drawn(lengths: Lengths) -> np.ndarray:
        return np.array([lengths.sample(generator) for _ in range(DRAWN)], np.int64)

    step = mix.slo.gap_ms / 1e3
    return rounded(gpus * goodput_roof(load_config(model), drawn(mix.prompts), drawn(mix.outputs), roofs, step))


def roofs_of(given: argparse.Namespace) -> Roofs | None:
    """Returns the given roofs, or measures them in a process that leaves the GPU empty; None on a CPU."""
    if given.product_tflops and given.copy_tbs:
        return Roofs(given.copy_tbs * 1e12, given.product_tflops * 1e12)
    if not given.gpus:
        return None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure_roofs).result()


def read_rates(texts: Sequence[str]) -> dict[str, list[float]]:
    """Returns the rates by mix; "" has the rates of all mixes. Raises UsageError."""
    rates: dict[str, list[float]] = {}
    for text in texts:
        mix, _, numbers = text.rpartition("=")
        try:
            found = [float(number) for number in numbers.split(":")]
        except ValueError:
            found = []
        if not found or min(found) <= 0 or mix not in ("", *MIXES):
            raise UsageError(f"--rates has {text!r}; it must be like 18.5 or A=18.5:23.3, with {', '.join(MIXES)}")
        rates.setdefault(mix, []).extend(found)
    return rates


def compare_to_off(targets: dict[str, dict[str, Any]]) -> None:
    """Beside the numbers of each cluster with drafts, their part of those of the same without. targets: by name."""
    for title, rows in targets.items():
        roles, method, *_ = title.split()
        off = targets.get(title.replace(f"{roles} {method}", f"{roles} {OFF}", 1))
        if method not in METHODS or off is None:
            continue
        for rate, numbers in rows["rates"].items():
            if rate in off["rates"]:
                numbers["token_to_off"] = rounded(numbers["token_ms"] / off["rates"][rate]["token_ms"])
        for rule, goodput in rows["goodput"].items():
            if "rps" in goodput and "rps" in off["goodput"].get(rule, {}):
                goodput["goodput_to_off"] = rounded(goodput["rps"] / off["goodput"][rule]["rps"])


def result_of(
    given: argparse.Namespace, found: dict[str, dict[str, Any]], limits: dict[str, float], roofs: Roofs | None
) -> dict[str, Any]:
    """Returns the result by mix, then by target."""
    mixes: dict[str, Any] = {}
    for name in given.mixes:
        targets = {target: rows[name] for target, rows in found.items() if name in rows}
        limit = limits.get(name)
        for rows in targets.values():
            for goodput in rows["goodput"].values() if limit else ():
                if "rps" in goodput:
                    goodput["to_limit"] = rounded(goodput["rps"] / limit)
        compare_to_off(targets)
        mixes[name] = ({"limit_rps": limit} if limit else {}) | targets
    measured = (
        {"product_tflops": rounded(roofs.product / 1e12), "copy_tbs": rounded(roofs.copy / 1e12)} if roofs else {}
    )
    return {"case": given.shape, "roofs": measured, "mixes": mixes}


def parse_options() -> argparse.Namespace:
    visible = torch.cuda.device_count()
    gpus = max(number for number in CONFIGS if number <= visible)
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--shape", type=lambda name: name if name in (TINY, AIR_CUT) else shape_name(name),
                        choices=[TINY, AIR_CUT, *SHAPES], default="qwen3-8b" if gpus else TINY)  # fmt: skip
    parser.add_argument("--gpus", type=int, choices=list(CONFIGS), default=gpus, help="of a cluster; 0: on a CPU")
    mixes = ["A", "A2", "B", "C"] if gpus else ["laptop"]
    add_list(parser, "--mixes", choices=list(MIXES), default=mixes, help="of requests")
    add_list(
        parser, "--roles", choices=ROLES, default=["adaptive"], nargs="*", help="a cluster each, one by one; or none"
    )
    add_list(parser, "--speculation", choices=METHODS, nargs="*", default=[], help="a cluster each, beside one without")
    add_list(parser, "--reserved-output", float, default=[], help="fractions, a cluster each")
    parser.add_argument("--pool-tokens", type=int, help="that a worker's pages hold; else what its memory allows")
    parser.add_argument("--asked-tokens", type=int, help="max_tokens of all requests, with --grpc; else what they take")
    parser.add_argument("--holds", type=float, default=0.7, help="part of tried drafted tokens that holds")
    parser.add_argument("--draft-tokens", type=int, default=3, help="most of a draft")
    parser.add_argument("--step-tokens", type=int, default=32, help="most of a step with drafts")
    parser.add_argument("--http", dest="frontends", action="append_const", const="http", help="the default")
    parser.add_argument("--grpc", dest="frontends", action="append_const", const="grpc", help="instead, or as well")
    add_list(parser, "--rates", default=[], help="requests a second: 4 8, or A=18.5:23.3 B=2")
    parser.add_argument("--sweep", action="store_true", help="look for the goodput, from the first rate on")
    parser.add_argument("--sweep-seconds", type=float, default=75.0, help="of one mix on one target")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of measured arrivals at a rate")
    parser.add_argument("--warmup-seconds", type=float, default=3.0, help="of arrivals before them")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds until a request has failed")
    parser.add_argument("--deadlines", type=float, default=0.85, help="part of a first token's limit; 0: no target")
    parser.add_argument("--token-share", type=float, default=0.95, help="of a sequence's tokens, in time")
    add_list(parser, "--gap-ms", float, default=[], help="limits of gaps, such as 15 10; else the mix's")
    add_list(parser, "--vllm", nargs="*", default=[], help="URLs of running servers, which get requests in turns")
    parser.add_argument("--vllm-site", type=Path, help="folder of packages with vLLM: starts a server on each GPU")
    add_list(parser, "--vllm-tokens", default=["320"], help=f"of a step, a start each; or {SHIPPED}")
    parser.add_argument("--product-tflops", type=float, help="of one GPU, 10^12 FLOP a second; else measured")
    parser.add_argument("--copy-tbs", type=float, help="of one GPU, 10^12 bytes a second; else measured")
    processes = min(MOST_PROCESSES, max(2, len(os.sched_getaffinity(0)) // 3))
    parser.add_argument("--processes", type=int, default=processes, help="of the load generator")
    parser.add_argument("--seed", type=int, default=0)
    add_seconds(parser)
    given = parser.parse_args()
    given.frontends = list(dict.fromkeys(given.frontends or ["http"]))
    if given.gpus == 1 and "split" in given.roles:
        parser.error("--roles has split, which needs --gpus 2 or 4")
    if given.asked_tokens and given.frontends != ["grpc"]:
        parser.error("--asked-tokens needs --grpc alone")
    if given.reserved_output and given.speculation:
        parser.error("--reserved-output and --speculation are compared one at a time")
    if "mtp" in given.speculation and given.shape not in (TINY, AIR_CUT, HYBRID):
        parser.error(f"--speculation has mtp, which needs --shape {AIR_CUT} or {HYBRID}")
    return given


def plan_of(given: argparse.Namespace, limits: dict[str, float], vocab_size: int) -> Plan:
    rates = read_rates(given.rates)
    by_limit = {name: [rounded(part * limit) for part in PARTS_OF_LIMIT] for name, limit in limits.items()}
    chosen = {
        name: rates.get(name) or rates.get("") or by_limit.get(name) or [MIXES[name].rate] for name in given.mixes
    }
    options = LoadOptions(given.window, warm_up_seconds=given.warmup_seconds, timeout=given.timeout)
    sweep = given.sweep_seconds if given.sweep else None
    return Plan(
        tuple(given.mixes), chosen, tuple(given.gap_ms), options, sweep, given.processes, given.seed, vocab_size
    )


def write_model(given: argparse.Namespace, folder: Path) -> Path:
    """A folder with a configuration and a tokenizer, with --speculation with weights, too."""
    if given.speculation or given.shape == AIR_CUT:
        tiny = AIR | TINY_AIR | EIGHT_LAYERS
        config = {TINY: tiny, AIR_CUT: AIR}.get(given.shape) or COMMON | SHAPES[given.shape]
        return write_target(config, folder / given.shape, given.holds)
    model = write_tiny(folder) if given.shape == TINY else write_shape(given.shape, folder)
    add_tokenizer(model)
    return model


def _longest(mix: Mix) -> int:
    return mix.prompts.high + mix.outputs.high


def main() -> None:
    given = parse_options()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        model = write_model(given, Path(folder))
        roofs = roofs_of(given)
        counted = max(1, given.gpus)
        limits = {name: limit_of(MIXES[name], model, roofs, counted) for name in given.mixes} if roofs else {}
        plan = plan_of(given, limits, min(VOCABULARY, load_config(model).vocab_size))
        found = measure_all(given, model, Path(folder), plan)
    print_result(result_of(given, found, limits, roofs), given, gpus=given.gpus)


if __name__ == "__main__":
    main()
