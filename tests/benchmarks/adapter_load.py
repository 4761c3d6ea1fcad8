"""What adding LoRA adapters costs the streams that run meanwhile, in a cluster of two workers, or of one. Prints JSON.

Requests of unlike lengths arrive at random times, whatever has been answered. Windows take turns: in one of them an
adapter is added, answers one request and is removed; a quiet one of the same length follows. A gap is
the time between two messages of a stream, and belongs to the window in which it ends.

    gap_p50_ms, gap_p99_ms, gap_max_ms    by kind of window
    add_ms, remove_ms                     from the call to its answer
    adapter_mib                           memory of one adapter on a worker
    ratios                                windows with an addition ÷ quiet ones

On a host with two GPUs that reach each other: --device cuda --model qwen3-8b --rate 20 --seconds 60
On one GPU, whose worker computes prompts and decodes: --workers 1, too
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tandem.cluster.client import AsyncClient
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import SHAPES, write_shape, write_tiny
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import at_most, percentile, print_result
from tests.support.client_requests import GREEDY
from tests.support.local_processes import LocalProcesses

CONFIGS = {("cpu", 2): "local.yaml", ("cuda", 2): "gpu-1p1d.yaml", ("cuda", 1): "gpu-1.yaml"}
TINY = "tiny"
DENSE = [name for name, shape in SHAPES.items() if "num_experts" not in shape]
QUIET, ADDING = "quiet", "adding"
WINDOW_SECONDS = 0.4  # at least, of each
WARM_SECONDS = 2.0
LIMIT = 1.2  # the 99th percentile of gaps beside additions ÷ without
FOLDERS = 4  # with unlike weights, which adapters take in turn
PROMPTS, OUTPUTS = (8, 192), (16, 96)  # tokens, from and to
VOCABULARY = 256
NUMBERS = ("gap_p50_ms", "gap_p99_ms", "gap_max_ms")


@dataclass
class Load:
    """Requests that arrive at random times."""

    client: AsyncClient
    rate: float
    kind: str = ""  # of the window now; none counts before the first
    seconds: dict[str, list[float]] = field(default_factory=lambda: {QUIET: [], ADDING: []})
    requests: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Until it is cancelled."""
        random = np.random.default_rng(0)
        async with asyncio.TaskGroup() as streams:
            while True:
                await asyncio.sleep(random.exponential(1 / self.rate))
                prompt = random.integers(3, VOCABULARY, random.integers(*PROMPTS)).tolist()
                streams.create_task(self._stream(prompt, int(random.integers(*OUTPUTS))))
                self.requests += 1

    async def _stream(self, prompt: list[int], tokens: int) -> None:
        last = 0.0
        try:
            async for _ in self.client.generate(prompt, max_tokens=tokens, timeout=60, **GREEDY):
                now = time.perf_counter()
                if last and self.kind:
                    self.seconds[self.kind].append(now - last)
                last = now
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:200])


@asynccontextmanager
async def loaded(client: AsyncClient, rate: float) -> AsyncGenerator[Load]:
    load = Load(client, rate)
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(WARM_SECONDS)
        yield load
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Random numbers, as PEFT writes them, for all products of a dense model."""
    fields: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads, inner = fields["hidden_size"], fields["num_attention_heads"], fields["intermediate_size"]
    head_dim = fields.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, fields["num_key_value_heads"] * head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(fields["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                numbers = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{which}.weight"] = numbers
    folder.mkdir(parents=True)
    targets = [name.partition(".")[2] for name in shapes]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        model = write_tiny(folder / TINY) if given.model == TINY else write_shape(given.model, folder)
        for number in range(FOLDERS):
            write_adapter(model, folder / "adapters" / str(number), given.rank, number)
        settings = {
            "model.max_model_len": 512,
            "adapters.max_resident": 4,
            "adapters.max_rank": given.rank,
            "adapters.allowed_root": str(folder / "adapters"),
        }
        if given.device == "cpu":
            settings |= {"island.threads_per_worker": 1}
        processes = LocalProcesses() if given.device == "cpu" else None
        with running_cluster(CONFIGS[given.device, given.workers], model, settings, processes) as cluster:
            return asyncio.run(_windows(cluster.grpc_address, folder / "adapters", given))


async def _windows(address: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(given.seconds)
    took: dict[str, list[float]] = {"add": [], "remove": []}
    size = 0
    async with AsyncClient(address) as client, loaded(client, given.rate) as load:
        for number in budget.within(range(given.adapters), least=2):
            length = WINDOW_SECONDS
            for kind in (ADDING, QUIET):
                load.kind, began = kind, time.perf_counter()
                if kind == ADDING:
                    added = await client.add_adapter("added", str(folder / str(number % FOLDERS)))
                    took["add"].append(time.perf_counter() - began)
                    size = added.bytes
                    async for _ in client.generate([5] * 32, max_tokens=1, model="added", **GREEDY):
                        pass
                    asked = time.perf_counter()
                    await client.remove_adapter("added")
                    took["remove"].append(time.perf_counter() - asked)
                    length = max(length, time.perf_counter() - began)
                await asyncio.sleep(max(0.0, began + length - time.perf_counter()))
        load.kind = ""
    found = {kind: _gaps(seconds) for kind, seconds in load.seconds.items()}
    return {
        "requests": load.requests,
        "errors": load.errors,
        "adapters": len(took["add"]),
        "adapter_mib": round(size / (1 << 20), 2),
        "windows": found,
        **{f"{name}_ms": Measured.median([1e3 * one for one in seconds]) for name, seconds in took.items()},
        "ratios": {name: found[ADDING][name] / found[QUIET][name] for name in NUMBERS},
    }


def _gaps(seconds: list[float]) -> dict[str, float]:
    milliseconds = [1e3 * one for one in seconds]
    p50, p99 = (percentile(milliseconds, percent) for percent in (50, 99))
    return {"gaps": len(seconds), "gap_p50_ms": p50, "gap_p99_ms": p99, "gap_max_ms": max(milliseconds)}


def main(arguments: list[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", type=int, default=2, choices=[1, 2], help="1: on a GPU alone")
    parser.add_argument("--model", default=TINY, choices=[TINY, *DENSE], help="a shape; its weights are random")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=20, help="that are added and removed in turn")
    add_seconds(parser)
    given = parser.parse_args(arguments)
    if (given.device, given.workers) not in CONFIGS:
        parser.error("--workers 1 needs --device cuda")
    found = measure(given)
    targets = [at_most("p99 of gaps beside additions ÷ quiet", found["ratios"]["gap_p99_ms"], LIMIT)]
    shown = {name: getattr(given, name) for name in ("device", "workers", "model", "rate", "rank")}
    print_result({**shown, **found, "targets": targets}, given, gpus=given.workers * int(given.device == "cuda"))


if __name__ == "__main__":
    main()
