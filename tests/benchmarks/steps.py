"""Prefill and decode steps of Qwen3 shapes on one GPU, no cluster, against roofs of the same run; prints JSON.

C: a device copy, bytes read and written a second. F: FLOP a second of an 8192³ bf16 product. decode: wall time of a
step, run ahead as a decode worker does; floor: (weights + KV bytes) / C; roof: the floor, where products take what is
longer, weights / C or their FLOP / F; idle: of the profiler's timeline of some more steps, what lies between steps
(idle_us) and between the kernels of a step (gaps_us), a step.
prefill: chunks of 8192 up to the first token, as of a lone prompt on a prefill worker; FLOP, counted with half of the
attention square, ÷ time ÷ F; floor: the FLOP at F or weights / C, what is longer; device: what all kernels and copies
of a prompt take, one after another.
Random weights and KV. Beside them vLLM 0.23.0 on the same kind of GPU, CUDA graphs, prefix cache off.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.results import at_least, at_most, print_result, print_skipped, rounded
from tests.benchmarks.timeline import Idle, idle, record

COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
DECODES = (  # batch, context
    (1, 1024), (2, 1024), (4, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024),
    (1, 8192), (1, 32768),
)  # fmt: skip
PREFILLS = (1024, 8192, 32768)
VLLM_DECODE_MS = {  # None: not measured
    "Qwen3-8B": (5.15, None, None, None, 5.79, None, 7.91, 11.1, 18.6, 5.43, 6.28),
    "Qwen3-0.6B": (1.64, None, None, None, 2.04, None, 3.67, 5.73, 9.95, 1.92, 2.56),
}
VLLM_PREFILL_MS = {"Qwen3-8B": (26.6, 216, 1244), "Qwen3-0.6B": (12.3, 32.1, 272)}
CHUNK = 8192
PAGE_SIZE = 16
WARM_STEPS = 5
STEPS = 40
RECORDED_STEPS = 8
FLOOR_TARGETS = {"Qwen3-8B": (1, 64, 256), "Qwen3-0.6B": (1,)}  # batches at the first context
FLOOR_LIMITS = {"Qwen3-8B": 1.18, "Qwen3-0.6B": 1.6}
IDLE_LIMIT_US = 20.0
PREFILL_LIMIT = 0.85
SHORT_PREFILLS = (32, 128, 512, 2048)
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Roofs:
    """copy: bytes a second; product: FLOP a second."""

    copy: float
    product: float


def device_seconds(run: Callable[[], object]) -> float:
    """Median on the device, caches flushed before each run."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(run, warmup=50, rep=300, return_mode="median")
    return milliseconds / 1e3


def measure_copy() -> float:
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / device_seconds(lambda: target.copy_(source))


def measure_roofs() -> Roofs:
    a, b = torch.randn((2, 8192, 8192), dtype=torch.bfloat16, device="cuda")
    return Roofs(measure_copy(), 2 * 8192**3 / device_seconds(lambda: a @ b))


class Bench:
    """One model with random weights, and a cache of random KV."""

    def __init__(
        self, name: str, max_batch: int, num_tokens: int | None = None, scales: KVScales | None = None
    ) -> None:
        """num_tokens: in all sequences together; None: as DECODES needs. scales: see KVLayout."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(COMMON | MODELS[name]))
            self.config = load_config(Path(folder), "bfloat16")
            decoder = load_decoder(Path(folder), self.config, load_format="dummy", device="cuda")
        group = LayerGroup(tuple(range(self.config.num_layers)), self.config.num_kv_heads, self.config.head_dim)
        layout = KVLayout((group,), PAGE_SIZE, self.config.dtype, scales)
        num_pages = (num_tokens or max_batch * 1200 + 40960) // PAGE_SIZE
        pool = random_pool((num_pages, *layout.page_shape(0)), layout.stored_dtype)
        self.cache = PagedKVCache(
            layout,
            (pool,),
            max_sequences=max_batch + 1,
            max_sequence_length=40960,
            rope=self.config.rope,
            writer=None,
        )
        self.runner = ModelRunner(decoder, self.cache)
        began = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_seconds = time.perf_counter() - began
        self.runner.capture_steps(max_batch)
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - began - self.warm_up_seconds

    def decode(self, batch: int, context: int, params: SamplingParams) -> tuple[float, Idle]:
        """Seconds of a step, and the idle time of one; `context` positions are stored before the middle one timed."""
        ids, stored = tuple(range(batch)), context - WARM_STEPS - STEPS // 2
        for sequence in ids:
            self.cache.add_sequence(sequence)
            self.cache.prepare_receive(sequence, stored)
            self.cache.finish_receive(sequence)
        sampling = SampleBatch.from_params([params] * batch)

        def run(steps: int) -> None:
            tokens, positions = np.ones(batch, np.int64), np.full(batch, stored)
            flight = self.runner.step(ids, tokens, np.full(batch, -1), sampling, positions)
            for step in range(1, steps):
                following = self.runner.step(ids, tokens, np.arange(batch), sampling, positions + step)
                flight.wait()
                flight = following
            flight.wait()

        run(WARM_STEPS)
        began = time.perf_counter()
        run(STEPS)
        seconds = (time.perf_counter() - began) / STEPS
        seen = idle(record(lambda: run(RECORDED_STEPS)))
        for sequence in range(batch):
            self.cache.remove_sequence(sequence)
        return seconds, Idle(seen.between / (RECORDED_STEPS - 1), seen.inside / RECORDED_STEPS)

    def prefill(self, length: int) -> tuple[float, float]:
        """Seconds to the first token, median of three after one, and those that the device works for it."""
        greedy = SampleBatch.from_params([SamplingParams(temperature=0)])
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, length)

        def run() -> None:
            self.cache.add_sequence(0)
            chunks = [tokens[begin : begin + CHUNK] for begin in range(0, length, CHUNK)]
            *_, logits = (self.runner.prompts([0], [chunk], [length], push=False) for chunk in chunks)
            self.runner.sample(logits, greedy, np.array([length]))
            self.cache.remove_sequence(0)

        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return sorted(times[1:])[1], sum(span.end - span.begin for span in record(run)) / 1e6


def random_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers; of 8 bits, page by page, for they cannot be drawn in place."""
    pool = torch.empty(shape, dtype=dtype, device="cuda")
    if dtype.itemsize > 1:
        return pool.normal_()
    some = torch.randn((min(64, shape[0]), *shape[1:]), device="cuda").to(dtype).view(torch.uint8)
    for part in pool.view(torch.uint8).split(some.shape[0]):
        part.copy_(some[: part.shape[0]])
    return pool


def layer_weights(config: ModelConfig) -> int:
    """Elements of the products of all layers."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def product_weights(config: ModelConfig) -> int:
    """Elements of all products of a decode step."""
    return layer_weights(config) + config.vocab_size * config.hidden_size


def kv_seconds(config: ModelConfig, batch: int, context: int, roofs: Roofs) -> float:
    kv = batch * context * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return kv * config.dtype.itemsize / roofs.copy


def decode_floor(config: ModelConfig, batch: int, context: int, roofs: Roofs) -> float:
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return weights + kv_seconds(config, batch, context, roofs)


def decode_roof(config: ModelConfig, batch: int, context: int, roofs: Roofs) -> float:
    products = 2 * product_weights(config) * batch / roofs.product
    return max(decode_floor(config, batch, context, roofs), products + kv_seconds(config, batch, context, roofs))


def prefill_flops(config: ModelConfig, length: int) -> float:
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    return 2 * layer_weights(config) * length + attention + 2 * config.vocab_size * config.hidden_size


def prefill_floor(config: ModelConfig, length: int, roofs: Roofs) -> float:
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return max(weights, prefill_flops(config, length) / roofs.product)


def measure(name: str, roofs: Roofs, *, max_batch: int = 256) -> dict[str, Any]:
    bench = Bench(name, max_batch)
    result: dict[str, Any] = {
        "warm_up_s": round(bench.warm_up_seconds, 2),
        "capture_s": round(bench.capture_seconds, 2),
    }
    greedy = SamplingParams(temperature=0)
    for (batch, context), theirs in zip(DECODES, VLLM_DECODE_MS[name], strict=True):
        seconds, unused = bench.decode(batch, context, greedy)
        result[f"decode {batch} at {context}"] = {
            "ms": round(seconds * 1e3, 3),
            "to_floor": round(seconds / decode_floor(bench.config, batch, context, roofs), 3),
            "to_roof": round(seconds / decode_roof(bench.config, batch, context, roofs), 3),
            "idle_us": round(unused.between, 1),
            "gaps_us": round(unused.inside, 1),
            "to_vllm": None if theirs is None else round(seconds * 1e3 / theirs, 3),
        }
    drawn = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1)
    result["decode 64 at 1024, drawn, ms"] = round(bench.decode(64, 1024, drawn)[0] * 1e3, 3)
    began = time.perf_counter()
    bench.runner.capture_prompts(CHUNK)
    torch.cuda.synchronize()
    result["capture_prompts_s"] = round(time.perf_counter() - began, 2)
    theirs_by_length = dict(zip(PREFILLS, VLLM_PREFILL_MS[name], strict=True))
    for length in sorted((*SHORT_PREFILLS, *PREFILLS)):
        seconds, on_device = bench.prefill(length)
        result[f"prefill {length}"] = {
            "ms": round(seconds * 1e3, 2),
            "to_floor": round(seconds / prefill_floor(bench.config, length, roofs), 3),
            "to_device": round(seconds / on_device, 3),
            "to_product": round(prefill_flops(bench.config, length) / seconds / roofs.product, 3),
        }
        if length in theirs_by_length:
            result[f"prefill {length}"]["to_vllm"] = round(seconds * 1e3 / theirs_by_length[length], 3)
    return result


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What issue 3 asks of results, measure()'s by model."""
    targets = []
    for name, result in results.items():
        for batch in FLOOR_TARGETS[name]:
            numbers = result[f"decode {batch} at 1024"]
            targets.append(at_most(f"{name}, decode of {batch} ÷ floor", numbers["to_floor"], FLOOR_LIMITS[name]))
            targets.append(at_most(f"{name}, decode of {batch}, idle µs", numbers["idle_us"], IDLE_LIMIT_US))
    for length in PREFILLS[1:] if "Qwen3-8B" in results else ():
        reached = results["Qwen3-8B"][f"prefill {length}"]["to_product"]
        targets.append(at_least(f"Qwen3-8B, prefill of {length} ÷ product", reached, PREFILL_LIMIT))
    return targets


def main() -> None:
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    roofs = measure_roofs()
    results: dict[str, Any] = {}
    for name in MODELS:
        results[name] = measure(name, roofs)
        torch.cuda.empty_cache()
    roof_numbers = {"copy_gb_per_s": rounded(roofs.copy / 1e9), "product_tflops": rounded(roofs.product / 1e12)}
    device = {"device": torch.cuda.get_device_name()}
    print_result(device | roof_numbers | results | {"targets": targets_of(results)})


if __name__ == "__main__":
    main()
