"""Latency and throughput of a cluster under load, as clients see them through gRPC. Prints JSON.

    closed loop   so many clients, each with one request under way
    open loop     requests arrive as a Poisson process, however many are under way

Prompts are random and all different; output has its full length. Per load: ttft and tpot (time per output token after
the first) in ms, at the median and the 99th percentile of the requests, output tokens and requests a second.

Without --address it starts a cluster, of --config or else of one prefill and one decode worker: Qwen3-8B's shape on
GPUs, a small Llama where there are none. Without --clients and --rate it tries several numbers of clients, then a rate
of LOADED times what the most of them reached.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.client import AsyncClient
from tandem.cluster.config import load_config
from tandem.workers.random_checkpoint import make_checkpoint
from tests.benchmarks.model_shapes import write_shape
from tests.benchmarks.pair import DEPLOY, LOWEST_TOKEN, running_cluster
from tests.benchmarks.results import percentile, plot, print_result, rounded

LOADED = 0.7
REQUEST_SECONDS = 600.0
WARM_UP_CLIENTS = 4


@dataclass(frozen=True)
class Size:
    """Of the requests, and how many clients are tried."""

    prompt: int
    output: int
    requests: int
    clients: tuple[int, ...]


GPU_SIZE = Size(1024, 128, 256, (1, 16, 64, 128))
CPU_SIZE = Size(64, 32, 32, (1, 8))


@dataclass(frozen=True)
class Served:
    """One request: seconds from its call to the first and the last token, and how many came."""

    first: float
    last: float
    tokens: int


class Load:
    """Sends requests of one size to one gateway; seed decides prompts and arrivals."""

    def __init__(self, client: AsyncClient, vocab_size: int, size: Size, seed: int) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._size = size
        self._random = random.Random(seed)

    async def request(self) -> Served:
        ids = [self._random.randrange(LOWEST_TOKEN, self._vocab_size) for _ in range(self._size.prompt)]
        began, times, tokens = time.perf_counter(), [], 0
        async for update in self._client.generate(
            ids, timeout=REQUEST_SECONDS, max_tokens=self._size.output, temperature=0, ignore_eos=True
        ):
            times.append(time.perf_counter() - began)
            tokens += len(update.token_ids)
        return Served(times[0], times[-1], tokens)

    async def closed_loop(self, clients: int, requests: int) -> list[Served]:
        left, served = iter(range(requests)), list[Served]()

        async def one() -> None:
            for _ in left:
                served.append(await self.request())

        await asyncio.gather(*(one() for _ in range(clients)))
        return served

    async def open_loop(self, rate: float, requests: int) -> list[Served]:
        async def one(after: float) -> Served:
            await asyncio.sleep(after)
            return await self.request()

        arrivals, now = [], 0.0
        for _ in range(requests):
            arrivals.append(now)
            now += self._random.expovariate(rate)
        return list(await asyncio.gather(*map(one, arrivals)))


async def measure(run: Callable[[], Awaitable[list[Served]]]) -> dict[str, float]:
    began = time.perf_counter()
    served = await run()
    seconds = time.perf_counter() - began
    first = [one.first * 1e3 for one in served]
    each = [(one.last - one.first) / max(1, one.tokens - 1) * 1e3 for one in served]
    numbers = {
        "requests": len(served),
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "tpot_p50_ms": percentile(each, 50),
        "tpot_p99_ms": percentile(each, 99),
        "tokens_s": sum(one.tokens for one in served) / seconds,
        "requests_s": len(served) / seconds,
    }
    return {name: rounded(value) for name, value in numbers.items()}


async def measure_all(address: str, size: Size, rate: float | None, seed: int) -> dict[str, dict[str, float]]:
    """Per load its numbers; rate None takes LOADED times that of the last closed loop."""
    async with AsyncClient(address) as client:
        load = Load(client, (await client.model_info()).vocab_size, size, seed)
        await load.closed_loop(WARM_UP_CLIENTS, WARM_UP_CLIENTS)
        results = {}
        for clients in size.clients:
            requests = min(size.requests, 16 * clients)
            results[f"{clients} clients"] = await measure(lambda c=clients, n=requests: load.closed_loop(c, n))
        reached = list(results.values())
        if rate is None and reached:
            rate = LOADED * reached[-1]["requests_s"]
        if rate is not None:
            results[f"{rate:.3g} requests/s"] = await measure(lambda: load.open_loop(rate, size.requests))
    return results


def result_of(model: str, size: Size, loads: dict[str, dict[str, float]]) -> dict[str, Any]:
    def column(name: str) -> list[float]:
        return [numbers[name] for numbers in loads.values()]

    names = list(loads)
    return {
        "model": model,
        "prompt_tokens": size.prompt,
        "output_tokens": size.output,
        "loads": loads,
        "plots": [
            plot("time to first token", "", "ms", names, {"p50": column("ttft_p50_ms"), "p99": column("ttft_p99_ms")}),
            plot("time per token", "", "ms", names, {"p50": column("tpot_p50_ms"), "p99": column("tpot_p99_ms")}),
            plot("throughput", "", "output tokens/s", names, {"tokens/s": column("tokens_s")}),
        ],
    }


@contextmanager
def cluster_for(config: str) -> Iterator[tuple[str, str]]:
    """Name of the model and address of a cluster that lives as long. config: a file of deploy/."""
    with tempfile.TemporaryDirectory() as folder:
        if load_config(DEPLOY / config).island.device == "cuda":
            name, overrides = "qwen3-8b", {"model.max_model_len": 8192}
            path = write_shape(name, Path(folder))
        else:
            name, overrides = "small Llama", {"model.load_format": "safetensors"}
            path = Path(folder) / "model"
            make_checkpoint(path, arch="llama", size="small")
        with running_cluster(config, path, overrides) as cluster:
            yield f"{name}, {config}", cluster.grpc_address


def main() -> None:
    on_gpus = torch.cuda.device_count() >= 2
    default = GPU_SIZE if on_gpus else CPU_SIZE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="HOST:PORT of the gateway of a running cluster")
    parser.add_argument("--config", default="gpu-1p1d.yaml" if on_gpus else "local.yaml", help="a file of deploy/")
    parser.add_argument("--clients", type=int, nargs="*", help="numbers of clients, one closed loop each")
    parser.add_argument("--rate", type=float, help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, default=default.requests, help="most requests of one load")
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=default.output, help="tokens of an output")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    clients = given.clients if given.clients is not None else () if given.rate else default.clients
    size = Size(given.prompt, given.output, given.requests, tuple(clients))
    if given.address:
        loads = asyncio.run(measure_all(given.address, size, given.rate, given.seed))
        print_result(result_of(given.address, size, loads))
        return
    with cluster_for(given.config) as (model, address):
        loads = asyncio.run(measure_all(address, size, given.rate, given.seed))
    print_result(result_of(model, size, loads))


if __name__ == "__main__":
    main()
