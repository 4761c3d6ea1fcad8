"""Prefixes that come back from host memory, against the host's link, computing them, and steps beside them; JSON.

Random weights and prompts, one GPU. The link is a copy of 1 GiB between pinned memory and the GPU, of the same run.

copies: a prompt's pages, evicted to host memory and fetched again, as a cache does it.
    down_to_link, up_to_link   bytes a second, with the calls that begin the copies, ÷ the link's in that direction
first_token: of a prompt whose pages are in host memory but for its last tokens; to_computed: ÷ that of the whole prompt
    computed. in_pages: where its pages are on the GPU.
steps: decode steps of some rows while pages of nobody are copied in both directions; to_quiet: ÷ the same without.
    begin_ms: host time of the calls that begin the copies of some steps.
trace: users who each send their next turn when they have its answer. A worker decodes and computes prompts; its pages
    hold 1 / --working-set of what all users need at the end. With and without host memory, each in a cluster of its
    own; --sides vllm adds vLLM's server with as many pages and its offload to as much host memory. tokens_per_second:
    of answers. to_without, to_vllm: ÷ the same without host memory, and of vLLM.

Without a GPU: --device cpu --model tiny. A part of it: --parts copies first_token
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tandem.cluster.tools.bench.open_target import open_target
from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.targets import Target, TargetSpec
from tandem.cluster.tools.bench.timeline import Running
from tandem.workers.models.registry import load_config
from tandem.workers.runner.model_cache import kv_layout
from tandem.workers.sampling.sample_batch import SampleBatch
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.model_bench import GREEDY, ModelBench, synchronize
from tests.benchmarks.model_shapes import SHAPES, add_tokenizer, write_shape, write_tiny
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import Numbers, at_least, at_most, noted, percentile, print_result, print_skipped
from tests.benchmarks.step_bench import PAGE_SIZE, SEGMENT, WARM_STEPS, step_times
from tests.benchmarks.vllm_servers import SHIPPED, running_vllm

PARTS = ("copies", "first_token", "steps", "trace")
SIDES = WITHOUT, WITH, VLLM = "without", "with", "vllm"
TINY = "tiny"
ANSWER_SECONDS = 600.0
LINK_BYTES = 1 << 30
CHUNK, ROUNDS, SEGMENTS = 8192, 3, 6
TAIL = 64  # tokens of the prompt behind its prefix
LOWEST_TOKEN = 3


def write_model(name: str, folder: Path) -> Path:
    return write_tiny(folder) if name == TINY else write_shape(name, folder)


def link_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second down and up; on a CPU those of a copy in memory."""
    pinned = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        return LINK_BYTES / min(
            timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(ROUNDS + 1)
        )

    return rate(pinned, there), rate(there, pinned)


def timed(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


class Tier:
    """A model's cache with a store behind it, and one prompt whose pages are in the index."""

    def __init__(self, model: str, device: str, prefix: int, rows: int, context: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            fields = json.loads((write_model(model, Path(folder)) / "config.json").read_text(encoding="utf-8"))
        length = max(prefix + TAIL, context)
        positions = 2 * (prefix + 8 * PAGE_SIZE) + rows * (context + 8 * PAGE_SIZE) + CHUNK
        self.bench = ModelBench(fields, device, sequences=rows + 2, length=length, chunk=CHUNK, positions=positions)
        self.cache, self.device = self.bench.cache, self.bench.device
        self.tokens = np.random.default_rng(1).integers(LOWEST_TOKEN, self.bench.config.vocab_size, prefix + TAIL)
        (pool,) = (group.site.pool for group in self.cache._groups)
        self.num_pages = prefix // PAGE_SIZE
        self.num_bytes = self.num_pages * pool[0].nbytes
        layers = [group.layers for group in self.cache.layout.groups]
        self.store = HostStore([pool], [4 * self.num_pages], layers=layers)
        self.store.memory.await_slot(0, 4 * self.num_pages - 1)
        self.cache.keep_evicted(self.store)
        with self.bench.published(self.tokens[:prefix], CHUNK):
            pass

    def evict(self) -> None:
        prefixes = self.cache._pools.prefixes
        prefixes.evict(0, prefixes.num_evictable[0])

    @contextmanager
    def matched(self) -> Iterator[None]:
        self.cache.add_sequence(1)
        try:
            assert self.cache.match_prefix(1, self.tokens) == self.num_pages * PAGE_SIZE
            yield
        finally:
            synchronize(self.device)
            self.cache.remove_sequence(1)

    def fetch_all(self) -> None:
        with self.matched():
            pass


def measure_copies(tier: Tier, link: tuple[float, float]) -> Numbers:
    down = timed(tier.evict, tier.device)
    ups = []
    for _ in range(ROUNDS + 1):
        ups.append(timed(tier.fetch_all, tier.device))
        tier.evict()  # the store has them: nothing is copied
    up = Measured.median(ups[1:])
    return {
        "mib": rounded(tier.num_bytes / (1 << 20)),
        "down_gb_s": rounded(tier.num_bytes / down / 1e9),
        "up_gb_s": rounded(tier.num_bytes / up / 1e9),
        "down_to_link": rounded(tier.num_bytes / down / link[0]),
        "up_to_link": rounded(tier.num_bytes / up / link[1]),
    }


def measure_first_token(tier: Tier) -> Numbers:
    bench, tokens = tier.bench, tier.tokens
    computed = Measured.median([bench.first_token(tokens, CHUNK) for _ in range(ROUNDS + 1)][1:])
    in_pages, hits = [], []
    tier.fetch_all()
    for _ in range(ROUNDS + 1):
        in_pages.append(bench.first_token(tokens, CHUNK, matches=True))
        tier.evict()
        synchronize(tier.device)
        hits.append(bench.first_token(tokens, CHUNK, matches=True))
    hit = Measured.median(hits[1:])
    return {
        "computed_ms": computed.scaled(1e3),
        "in_pages_ms": Measured.median(in_pages[1:]).scaled(1e3),
        "hit_ms": hit.scaled(1e3),
        "to_computed": hit.scaled(1 / computed),
    }


def measure_steps(tier: Tier, rows: int, context: int) -> Numbers:
    """Each segment of steps begins while copies run that last longer than it does on a GPU."""
    bench, names = tier.bench, count()
    tier.fetch_all()
    pages = np.flatnonzero(tier.cache._pools.prefixes.indexed[0])[: tier.num_pages].astype(np.int32)
    contexts = np.full(rows, context, np.int64)
    with bench.stored(contexts) as ids:
        sampling, at = SampleBatch.from_params([GREEDY] * rows), contexts

        def segment() -> float:
            nonlocal at
            times = step_times(bench.runner, ids, sampling, at, SEGMENT)
            at = at + SEGMENT
            return (times[-1] - times[0]) / SEGMENT

        step_times(bench.runner, ids, sampling, at, WARM_STEPS)
        at = at + WARM_STEPS
        quiet, beside, begun, lasting = [], [], [], 0
        for _ in range(SEGMENTS // 2):
            quiet.append(segment())
            synchronize(tier.device)
            began = time.perf_counter()
            copy_both_ways(tier.store, pages, names)
            begun.append(time.perf_counter() - began)
            beside.append(segment())
            lasting += tier.store.copies.mark() is not None
            synchronize(tier.device)
    alone = Measured.median(quiet)
    return {
        "rows": rows,
        "quiet_ms": alone.scaled(1e3),
        "to_quiet": Measured.median(beside).scaled(1 / alone),
        "begin_ms": Measured.median(begun).scaled(1e3),
        "copies_lasted": f"{lasting} of {len(beside)}",
    }


def copy_both_ways(store: HostStore, pages: Int32Array, names: Iterator[int]) -> None:
    """Pages go down under new names, and come up again, twice."""
    for _ in range(2):
        digests = [next(names).to_bytes(16, "big") for _ in pages]
        store.put(NamedPages(0, digests, pages))
        store.fetch([NamedPages(0, digests, pages)])


class Users:
    """Each sends its turns one after another."""

    def __init__(self, options: argparse.Namespace, total_tokens: int, vocab_size: int) -> None:
        draw = np.random.default_rng(2)
        self.answer = options.answer
        self.question = max(total_tokens // (options.users * options.turns) - self.answer, PAGE_SIZE)
        shape = (options.users, options.turns, self.question)
        self._questions = draw.integers(LOWEST_TOKEN, vocab_size, shape).tolist()
        self.firsts: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def longest(self) -> int:
        return len(self._questions[0]) * (self.question + self.answer)

    async def run(self, spec: TargetSpec) -> float:
        """Seconds from the first request to the last token."""
        async with aclosing(open_target(spec)) as target:
            asked = replace(spec, model=(await target.served()).model)
        began = time.perf_counter()
        async with aclosing(open_target(asked)) as target, asyncio.TaskGroup() as group:
            for questions in self._questions:
                group.create_task(self._user(target, questions))
        return time.perf_counter() - began

    async def _user(self, target: Target, questions: list[list[int]]) -> None:
        prompt: list[int] = []
        for question in questions:
            prompt = prompt + question
            running = Running(self.answer, time.perf_counter(), keeps_tokens=True)
            await target.stream([Message("user", token_ids=prompt)], running, ANSWER_SECONDS)
            self.firsts.append(running.arrivals[0] - running.sent)
            self.prompt_tokens += running.prompt_tokens
            self.cached_tokens += running.cached_tokens
            prompt = prompt + running.token_ids

    def numbers(self, seconds: float, turns: int) -> Numbers:
        return {
            "seconds": rounded(seconds),
            "tokens_per_second": rounded(turns * self.answer / seconds),
            "first_token_p50_ms": rounded(percentile(self.firsts, 50) * 1e3),
            "first_token_p99_ms": rounded(percentile(self.firsts, 99) * 1e3),
            "cached_share": rounded(self.cached_tokens / self.prompt_tokens),
        }


@contextmanager
def trace_target(
    options: argparse.Namespace, side: str, model: Path, users: Users, num_pages: int
) -> Iterator[TargetSpec]:
    """A server whose pages hold num_pages, until the context ends. side: one of SIDES."""
    host_bytes = int(1.25 * options.working_set * options.pool_gb * 1e9)
    longest = users.longest + PAGE_SIZE
    if side == VLLM:
        logs = Path(tempfile.gettempdir())  # which outlasts this run
        flags = [
            *("--enable-prefix-caching", "--block-size", str(PAGE_SIZE), "--num-gpu-blocks-override", str(num_pages)),
            *("--max-model-len", str(longest), "--max-num-seqs", str(options.users)),
            *("--kv-offloading-size", str(host_bytes / (1 << 30)), "--kv-offloading-backend", "native"),
        ]
        with running_vllm(options.vllm_site, model, SHIPPED, 1, logs, flags) as urls:
            yield TargetSpec(urls=tuple(urls))
        return
    overrides: dict[str, Any] = {
        "cache.num_pages": num_pages,
        "cache.page_size": PAGE_SIZE,
        "cache.host_bytes": host_bytes if side == WITH else 0,
        "model.max_model_len": longest,
        "scheduler.max_sequences": options.users,
        "scheduler.roles": "colocated",
        "island.num_prefill": 0,
    }
    deploy = "gpu-1.yaml" if options.device == "cuda" else "local.yaml"
    with running_cluster(deploy, model, overrides) as cluster:
        yield TargetSpec(grpc=cluster.grpc_address)


def measure_trace(options: argparse.Namespace) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.model, Path(folder))
        if VLLM in options.sides:
            add_tokenizer(model)
        config = load_config(model, "bfloat16" if options.device == "cuda" else "float32")
        num_pages = int(options.pool_gb * 1e9) // kv_layout(config, PAGE_SIZE).page_bytes(0)
        found: Numbers = {"pool_pages": num_pages}
        for side in options.sides:
            users = Users(options, int(options.working_set * num_pages) * PAGE_SIZE, config.vocab_size)
            with trace_target(options, side, model, users, num_pages) as target:
                seconds = asyncio.run(users.run(target))
            found[side] = users.numbers(seconds, options.users * options.turns)
            print(side, json.dumps(found[side]), file=sys.stderr, flush=True)  # for who ends the benchmark early
    for side in (WITHOUT, VLLM):
        if {WITH, side} <= found.keys():
            found[f"to_{side}"] = rounded(found[WITH]["tokens_per_second"] / found[side]["tokens_per_second"])
    return found


def targets_of(result: Numbers) -> list[dict[str, Any]]:
    targets = []
    for part, key, limit, bound in (
        ("copies", "down_to_link", 0.85, at_least),
        ("copies", "up_to_link", 0.85, at_least),
        ("first_token", "to_computed", 0.25, at_most),
        ("steps", "to_quiet", 1.03, at_most),
        ("trace", "to_without", 2.0, at_least),
        ("trace", "to_vllm", 1.0, at_least),
    ):
        if key in result.get(part, {}):
            targets.append(bound(f"{part}: {key}", result[part][key], limit))
    return targets


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="qwen3-8b", choices=[TINY, *SHAPES])
    parser.add_argument("--prefix", type=int, default=8192, help="tokens of the prefix, whole pages")
    parser.add_argument("--rows", type=int, default=32, help="of decode steps")
    parser.add_argument("--context", type=int, default=1024, help="of these rows")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer of the trace")
    parser.add_argument("--pool-gb", type=float, default=16.0, help="pages of the trace's worker")
    parser.add_argument("--working-set", type=float, default=3.0, help="what all users need at the end, in pools")
    add_list(parser, "--sides", default=SIDES[:2], choices=SIDES, help="of the trace; vllm needs --vllm-site")
    parser.add_argument("--vllm-site", type=Path, help="folder of packages with vLLM")
    options = parser.parse_args()
    if VLLM in options.sides and options.vllm_site is None:
        parser.error("--sides has vllm, which needs --vllm-site")
    if options.device == "cuda" and not torch.cuda.is_available():
        print_skipped("no CUDA GPU")
        return
    result: Numbers = {"model": options.model}
    alone = [part for part in options.parts if part != "trace"]
    if alone:
        device = torch.device(options.device)
        link = link_rates(device)
        result["link_gb_s"] = {"down": rounded(link[0] / 1e9), "up": rounded(link[1] / 1e9)}
        tier = Tier(options.model, options.device, options.prefix, options.rows, options.context)
        if options.device == "cuda" and "steps" in alone:
            tier.bench.capture_steps(options.rows)
        if "copies" in alone:
            noted(result, "copies", lambda: measure_copies(tier, link))
        if "first_token" in alone:
            noted(result, "first_token", lambda: measure_first_token(tier))
        if "steps" in alone:
            noted(result, "steps", lambda: measure_steps(tier, options.rows, options.context))
        del tier
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()  # the trace's worker has this GPU
    if "trace" in options.parts:
        noted(result, "trace", lambda: measure_trace(options))
    if options.model == "qwen3-8b":
        result["targets"] = targets_of(result)
    print_result(result, options, gpus=int(options.device == "cuda"))


if __name__ == "__main__":
    main()
