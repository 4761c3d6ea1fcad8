"""First tokens of requests with a high priority: on a worker full of others, against an idle one; JSON.

One worker computes prompts and decodes. Requests of the high class (priority -1) arrive at random, --rate a second;
their prompts have the lengths of mix A. In the busy part, --low requests of priority 0 run or wait all the time, more
than the worker has sequences (--sequences) or pages (--pool-tokens): it parks the latest of them for each of the high
class.

quiet, busy: of the high class, its number of requests, first_token_p50_ms and first_token_p99_ms, and parts of that:
    queue_p50_ms until the gateway places it, prefill_p50_ms until its prompt is computed. busy has also
    low_tokens_s: tokens a second of the low class beside it. parked: how often a sequence was parked.
to_quiet: the busy p99 ÷ the quiet one.

Without a GPU: --device cpu --model tiny
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.cluster.client import AsyncClient
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.mixes import MIXES
from tandem.workers.models.registry import load_config
from tests.benchmarks.load import LOWEST_TOKEN
from tests.benchmarks.measured import rounded
from tests.benchmarks.model_shapes import SHAPES, write_shape, write_tiny
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import Numbers, at_most, percentile, print_result

TINY = "tiny"
HIGH, LOW = -1, 0
HIGH_OUTPUT = 32  # tokens
PAGE_SIZE = 16
WARM_SECONDS = 5.0
CALL_SECONDS = 300.0
PARKED_BYTES = {"cuda": 16 << 30, "cpu": 1 << 28}
TARGET = 1.2


class Traffic:
    """Both classes of requests to one gateway."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace, vocab_size: int) -> None:
        self._client = client
        self._options = options
        self._vocab_size = vocab_size
        mix = MIXES["laptop" if options.model == TINY else "A"]
        self._prompts, self._outputs = mix.prompts, Lengths.uniform(mix.outputs.high, 2 * mix.outputs.high)
        self._lengths = {HIGH: np.random.default_rng(7), LOW: np.random.default_rng(8)}
        self._tokens = np.random.default_rng()  # of all prompts, so that none begins like another

    async def high_class(self, seconds: float, seed: int) -> Numbers:
        """Sends requests of the high class for `seconds`, and returns their figures. The seed sets arrivals and
        lengths."""
        arrivals, self._lengths[HIGH] = random.Random(seed), np.random.default_rng(seed)
        waits: list[asyncio.Task[First]] = []
        begun, arrival = time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as group:
            while arrival < seconds:
                await asyncio.sleep(begun + arrival - time.perf_counter())
                waits.append(group.create_task(self._request(HIGH, HIGH_OUTPUT)))
                arrival += arrivals.expovariate(self._options.rate)
        return told([task.result() for task in waits])

    async def keep_full(self, received: "Synchronized[int]") -> None:
        """Sends requests of the low class, one after another in each of --low tasks, until it is cancelled. received:
        counts their tokens."""

        async def one_after_another() -> None:
            while True:
                await self._request(LOW, self._outputs.sample(self._lengths[LOW]), received)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.low):
                group.create_task(one_after_another())

    async def _request(self, priority: int, output: int, received: "Synchronized[int] | None" = None) -> "First":
        length = self._prompts.sample(self._lengths[priority])
        prompt = self._tokens.integers(LOWEST_TOKEN, self._vocab_size, length).tolist()
        sampling: dict[str, Any] = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "priority": priority}
        sent, first, timings = time.perf_counter(), 0.0, None
        async for update in self._client.generate(prompt, timeout=CALL_SECONDS, **sampling):
            if update.token_ids:
                first = first or time.perf_counter() - sent
                if received is not None:
                    received.value += len(update.token_ids)
            timings = update.timings or timings
        assert timings is not None, "the last message has them"
        return First(first, timings.queue_seconds, timings.prefill_seconds)


class First(NamedTuple):
    """Seconds to a request's first token, in the gateway's queue, and of its prompt."""

    whole: float
    queue: float
    prefill: float


def told(firsts: list[First]) -> Numbers:
    whole = [one.whole for one in firsts]
    return {
        "requests": len(firsts),
        "first_token_p50_ms": rounded(percentile(whole, 50) * 1e3),
        "first_token_p99_ms": rounded(percentile(whole, 99) * 1e3),
        "queue_p50_ms": rounded(percentile([one.queue for one in firsts], 50) * 1e3),
        "prefill_p50_ms": rounded(percentile([one.prefill for one in firsts], 50) * 1e3),
    }


def parked_count(http_address: str) -> int:
    """How often a worker has parked a sequence, by the gateway's metrics."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("tandem:worker_parks_total")))


async def measure(options: argparse.Namespace, grpc_address: str, http_address: str, vocab_size: int) -> Numbers:
    async with AsyncClient(grpc_address) as client:
        traffic = Traffic(client, options, vocab_size)
        await traffic.high_class(WARM_SECONDS, seed=0)
        quiet = await traffic.high_class(options.window, seed=1)
        print("quiet", json.dumps(quiet), file=sys.stderr, flush=True)
        with low_class(options, grpc_address, vocab_size) as received:
            await asyncio.sleep(2 * WARM_SECONDS)
            before, began, parked = received.value, time.perf_counter(), parked_count(http_address)
            busy = await traffic.high_class(options.window, seed=1)
            busy["low_tokens_s"] = rounded((received.value - before) / (time.perf_counter() - began))
            busy["parked"] = parked_count(http_address) - parked
            print("busy", json.dumps(busy), file=sys.stderr, flush=True)
    return {"quiet": quiet, "busy": busy, "to_quiet": rounded(busy["first_token_p99_ms"] / quiet["first_token_p99_ms"])}


@contextmanager
def low_class(options: argparse.Namespace, grpc_address: str, vocab_size: int) -> Generator["Synchronized[int]"]:
    """The low class, in a process of its own, so that its tokens do not hold up the first tokens that are measured. Its
    first token has come when the block begins."""
    spawning = get_context("spawn")
    received: Synchronized[int] = spawning.Value("q")
    process = spawning.Process(target=send_low, args=(options, grpc_address, vocab_size, received), daemon=True)
    process.start()
    try:
        while process.is_alive() and not received.value:
            time.sleep(WARM_SECONDS / 10)
        assert process.is_alive(), "a request of the low class failed"
        yield received
        assert process.is_alive(), "a request of the low class failed"
    finally:
        process.kill()
        process.join()


def send_low(options: argparse.Namespace, address: str, vocab_size: int, received: "Synchronized[int]") -> None:
    """The process of the low class."""

    async def send() -> None:
        async with AsyncClient(address) as client:
            await Traffic(client, options, vocab_size).keep_full(received)

    asyncio.run(send())


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="qwen3-8b", choices=[TINY, *SHAPES])
    parser.add_argument("--rate", type=float, default=3.0, help="requests of the high class a second")
    parser.add_argument("--window", type=float, default=40.0, help="seconds of each part")
    parser.add_argument("--low", type=int, default=96, help="requests of the low class at a time")
    parser.add_argument("--sequences", type=int, default=64, help="most that the worker decodes at a time")
    parser.add_argument("--batch-tokens", type=int, help="most of a step; else the configuration's")
    parser.add_argument("--pool-tokens", type=int, help="that the worker's pages hold; else what its memory allows")
    options = parser.parse_args()
    overrides: dict[str, Any] = {
        "cache.parked_bytes": PARKED_BYTES[options.device],
        "gateway.priorities": [HIGH, 10],
        "gateway.http_port": 0,
        "scheduler.max_sequences": options.sequences,
        "scheduler.roles": "colocated",
        "island.num_prefill": 0,
    }
    if options.batch_tokens:
        overrides["scheduler.max_batch_tokens"] = options.batch_tokens
    if options.pool_tokens:
        overrides |= {"cache.page_size": PAGE_SIZE, "cache.num_pages": options.pool_tokens // PAGE_SIZE}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny(Path(folder)) if options.model == TINY else write_shape(options.model, Path(folder))
        vocab_size = load_config(model, "float32").vocab_size
        deploy = "gpu-1.yaml" if options.device == "cuda" else "local.yaml"
        with running_cluster(deploy, model, overrides) as cluster:
            result = asyncio.run(measure(options, cluster.grpc_address, str(cluster.http_address), vocab_size))
    targets = [at_most("first token of the high class: busy p99 ÷ quiet p99", result["to_quiet"], TARGET)]
    print_result({"model": options.model, **result, "targets": targets}, options, gpus=int(options.device == "cuda"))


if __name__ == "__main__":
    main()
