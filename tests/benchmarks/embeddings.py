"""Embeddings of a cluster with one prefill worker, against the forwards that its device can do; JSON.

Random weights and token ids, float32 on a CPU and bfloat16 on a GPU. Callers send requests of several inputs one after
another, over gRPC. No prefix is cached. Cases: inputs of one length, and of unlike lengths, 1 to twice the one given.

roof: prompt tokens a second of forwards alone, full of prompts of that length, in this process on the same device.
inputs_per_second, tokens_per_second: of the cluster. to_roof: tokens a second ÷ the roof.
beside: the same while streams are decoded; token_ms: median time between their tokens, and quiet_token_ms without.

Without a GPU: --device cpu --model small --batch-tokens 1024 --inputs 64 --batch 16
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from tandem.cluster.client import AsyncClient
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.model_bench import ModelBench, synchronize
from tests.benchmarks.model_shapes import SHAPES, write_shape, write_tiny
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import Numbers, at_least, noted, print_result, print_skipped
from tests.support.local_processes import LocalProcesses
from tests.support.whole_prompts import compute_prompts

CONFIGS = {"cpu": "local.yaml", "cuda": "gpu-1.yaml"}
SMALL = "small"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "head_dim": 64,
}
LOWEST_TOKEN = 3
ROUNDS = 3
STREAM_TOKENS = 4000


def write_model(name: str, folder: Path) -> Path:
    """SMALL: of a size for which a CPU has to compute more than to start."""
    if name != SMALL:
        return write_shape(name, folder)
    config = write_tiny(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SIZES), encoding="utf-8")
    return config.parent


def lengths_of(case: str, count: int) -> list[int]:
    """case: `512`, or `1-1024` for unlike ones."""
    low, _, high = case.partition("-")
    return np.random.default_rng(0).integers(int(low), int(high or low) + 1, count).tolist()


def measure_roof(options: argparse.Namespace, case: str) -> Measured:
    """Tokens a second, median of ROUNDS after one."""
    with tempfile.TemporaryDirectory() as folder:
        fields = json.loads((write_model(options.model, Path(folder)) / "config.json").read_text(encoding="utf-8"))
    lengths = lengths_of(case, options.inputs)
    batch, total = list[int](), 0
    for length in lengths:
        if batch and total + length > options.batch_tokens:
            break
        batch.append(length)
        total += length
    bench = ModelBench(fields, options.device, sequences=len(batch), length=max(batch), chunk=options.batch_tokens)
    dice, vocab_size = np.random.default_rng(1), bench.config.vocab_size
    rates = []
    for _ in range(ROUNDS + 1):
        prompts = [dice.integers(LOWEST_TOKEN, vocab_size, length) for length in batch]
        for sequence in range(len(batch)):
            bench.cache.add_sequence(sequence)
        synchronize(bench.device)
        began = time.perf_counter()
        compute_prompts(bench.runner, list(range(len(batch))), prompts, batch, push=False)
        synchronize(bench.device)
        rates.append(total / (time.perf_counter() - began))
        for sequence in range(len(batch)):
            bench.cache.remove_sequence(sequence)
    return Measured.median(rates[1:])


class Callers:
    """Send requests of some inputs, one after another each."""

    def __init__(self, client: AsyncClient, vocab_size: int, options: argparse.Namespace) -> None:
        self._client, self._options, self._vocab_size = client, options, vocab_size
        self._dice = np.random.default_rng(2)

    async def run(self, case: str) -> tuple[float, float]:
        """Inputs and tokens a second."""
        options, lengths = self._options, lengths_of(case, self._options.inputs * self._options.callers)
        prompts = [self._dice.integers(LOWEST_TOKEN, self._vocab_size, length).tolist() for length in lengths]
        batches = [prompts[begin : begin + options.batch] for begin in range(0, len(prompts), options.batch)]
        began = time.perf_counter()
        await asyncio.gather(*(self._call(batches[caller :: options.callers]) for caller in range(options.callers)))
        seconds = time.perf_counter() - began
        return len(prompts) / seconds, sum(lengths) / seconds

    async def _call(self, batches: Sequence[Sequence[list[int]]]) -> None:
        for batch in batches:
            await self._client.embed(list(batch))


@asynccontextmanager
async def streams(client: AsyncClient, count: int) -> AsyncGenerator[list[float]]:
    """So many streams while the block runs. Gives a list that gets the gaps between their tokens."""
    gaps: list[float] = []

    async def read(number: int) -> None:
        last = 0.0
        updates = client.generate([5, 6, 7, 8 + number], max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
        async for update in updates:
            now = time.perf_counter()
            if last and update.token_ids:
                gaps.extend([(now - last) / len(update.token_ids)] * len(update.token_ids))
            last = now

    reading = [asyncio.ensure_future(read(number)) for number in range(count)]
    while len(gaps) < 4 * count:
        await asyncio.sleep(0.01)
    try:
        yield gaps
    finally:
        for one in reading:
            one.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*reading)


async def measure_case(address: str, options: argparse.Namespace, case: str, roof: float) -> Numbers:
    async with AsyncClient(address) as client:
        callers = Callers(client, (await client.model_info()).vocab_size, options)
        await callers.run(case)
        rates = [await callers.run(case) for _ in range(ROUNDS)]
        inputs, tokens = (Measured.median(values) for values in zip(*rates, strict=True))
        found: Numbers = {
            "roof_tokens_per_second": roof,
            "inputs_per_second": inputs,
            "tokens_per_second": tokens,
            "to_roof": rounded(tokens / roof),
        }
        if options.streams:
            async with streams(client, options.streams) as gaps:
                await asyncio.sleep(1)
                quiet = statistics.median(gaps)
                gaps.clear()
                beside = await callers.run(case)
                found["beside"] = {
                    "tokens_per_second": rounded(beside[1]),
                    "quiet_token_ms": rounded(1e3 * quiet),
                    "token_ms": rounded(1e3 * statistics.median(gaps)),
                }
        return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--device", choices=CONFIGS, default="cuda")
    parser.add_argument("--model", choices=(SMALL, *SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="scheduler.max_batch_tokens")
    parser.add_argument("--inputs", type=int, default=256, help="of a caller in a round")
    parser.add_argument("--batch", type=int, default=64, help="inputs of a request")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=0, help="that are decoded beside; 0 measures none")
    add_list(parser, "--lengths", default=["16", "128", "512", "1-1024"], help="tokens of an input")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print_skipped("no CUDA GPU")
        return
    if options.device == "cpu":
        torch.set_num_threads(1)  # as the worker has
    result: Numbers = {"model": options.model, "batch_tokens": options.batch_tokens}
    roofs = {case: measure_roof(options, case) for case in options.lengths}
    if options.device == "cuda":
        torch.cuda.empty_cache()  # the worker has this GPU
    settings = {"scheduler.max_batch_tokens": options.batch_tokens, "cache.prefix_sharing": False}
    settings |= {"model.max_model_len": 8192, "gateway.processes": 1}
    if options.device == "cpu":
        settings |= {"cache.num_pages": 4096, "island.threads_per_worker": 1}
    processes = LocalProcesses() if options.device == "cpu" else None
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(options.model, Path(folder))
        with running_cluster(CONFIGS[options.device], model, settings, processes) as cluster:
            for case in options.lengths:
                measure = measure_case(cluster.grpc_address, options, case, roofs[case])
                noted(result, case, lambda measure=measure: asyncio.run(measure))
    result["targets"] = [at_least(f"{case} to roof", result[case].get("to_roof", 0.0), 0.8) for case in options.lengths]
    print_result(result, options, gpus=int(options.device == "cuda"))


if __name__ == "__main__":
    main()
