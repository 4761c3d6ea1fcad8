"""Gated delta rule in Qwen3-Next-80B-A3B's sizes against what its memory and products take at least; prints JSON.

decode: a single token of each row in one layer, without products. The floor reads and writes each row's entry once, at
the speed of a device copy. Each call computes 36 layers, whose states do not fit into the cache of a GPU.
prefill: one prompt in one layer. The floor is the products of the chunk form at the speed of a large one in bfloat16.
model: decode steps and a prompt of eight layers with random weights. The floor of a step reads all weights that it
needs, with experts drawn evenly, and reads and writes the states; its few K and V are left out.
Times of decode and prefill are of CUDA graphs.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.states import look_up_states
from tandem.cache.kernels.base import GroupPlan
from tandem.cache.kernels.delta.kernels import TritonDeltaKernels
from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs
from tandem.cache.kernels.torch.delta_rule import CHUNK
from tandem.cache.plan.tables import lay_out_tokens, look_up_pages
from tandem.workers.models.config import ModelConfig
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.device_time import graph_seconds, kernel_microseconds
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_least, print_result, print_skipped
from tests.benchmarks.roofs import Roofs, measure_roofs
from tests.benchmarks.step_bench import Bench

NEXT = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, tail=3)
LAYERS = 36
DTYPE = torch.bfloat16
MODEL = "qwen3-next-8-layers"
ROWS, CONTEXT, PROMPT = (1, 64), Contexts("1024"), 8192
PARTS = ("decode", "prefill", "model")


class Layers:
    """States of `rows` sequences, each with `new` more tokens. As many layers as `layers`, given the same numbers."""

    def __init__(self, rows: int, new: int, layers: int) -> None:
        pool = torch.randn((rows, layers, 1, 1, 1, NEXT.numbers), device="cuda")
        self._kernels, self._layers = TritonDeltaKernels(pool, NEXT), layers
        tokens = lay_out_tokens(np.full(rows, 9), np.full(rows, new))
        pages, indices = np.arange(rows, dtype=np.int32)[:, None], np.arange(rows)
        tables = look_up_states(lambda which, entries: look_up_pages(pages, which, entries, 1), indices, tokens)
        self._plan = GroupPlan(self._kernels.plan(tokens, tables), None)
        count, heads = rows * new, NEXT.value_heads
        mixed, conv = torch.randn(count, NEXT.channels, device="cuda"), torch.randn(NEXT.channels, 4, device="cuda")
        log_decay, beta = -torch.rand(count, heads, device="cuda"), torch.rand(count, heads, device="cuda")
        self._x = RecurrentInputs(mixed.to(DTYPE), conv.to(DTYPE), log_decay, beta)

    def run(self) -> Tensor:
        return [self._kernels.run(self._plan, layer, self._x) for layer in range(self._layers)][-1]


def compared(seconds: Measured, floor: float) -> dict[str, float]:
    ratio = rounded(floor / seconds)
    return {"layer_us": seconds.scaled(1e6), "floor_us": rounded(floor * 1e6), "floor_to_layer": ratio}


def measure_decode(rows: int, roofs: Roofs) -> dict[str, float]:
    seconds = graph_seconds(Layers(rows, 1, LAYERS).run).scaled(1 / LAYERS)
    floor = 2 * rows * NEXT.numbers * 4 / roofs.copy
    return {
        "layer_us": seconds.scaled(1e6),
        "floor_us": rounded(floor * 1e6),
        "floor_to_layer": rounded(floor / seconds),
    }


def chunk_flops(tokens: int) -> int:
    """Returns the FLOPs of all value heads."""
    keys, values = NEXT.key_dim, NEXT.value_dim
    within = 3 * CHUNK * keys + 2 * CHUNK * values + 4 * CHUNK * CHUNK
    return 2 * tokens * NEXT.value_heads * (within + 3 * keys * values)


def measure_prefill(prompt: int, roofs: Roofs) -> dict[str, Any]:
    layer = Layers(1, prompt, 1)
    seconds, floor = graph_seconds(layer.run), chunk_flops(prompt) / roofs.product
    return {
        "layer_us": seconds.scaled(1e6),
        "floor_us": rounded(floor * 1e6),
        "floor_to_layer": rounded(floor / seconds),
        "kernels_us": kernel_microseconds(layer.run),
    }


def step_floor(config: ModelConfig, weight_bytes: int, rows: int, roofs: Roofs) -> float:
    """Seconds of a step of `rows`."""
    moe, recurrent = config.moe, config.recurrent
    assert moe is not None
    assert recurrent is not None
    expert = 3 * config.hidden_size * moe.intermediate_size
    left_out = (1 - moe.routing.top_k / moe.num_experts) ** rows  # of the experts
    experts = config.num_layers * moe.num_experts * expert * left_out
    unread = (experts + config.vocab_size * config.hidden_size) * DTYPE.itemsize
    states = 2 * rows * len(recurrent.layers) * recurrent.shape.numbers * 4
    return (weight_bytes - unread + states) / roofs.copy


def measure_model(options: argparse.Namespace, roofs: Roofs) -> dict[str, Any]:
    bench = Bench(MODEL, max(options.rows), 1200 * max(options.rows) + 2 * options.prompt)
    found: dict[str, Any] = {"weights_gib": round(bench.weight_bytes / (1 << 30), 2)}
    for rows in options.rows:
        seconds, unused = bench.decode(CONTEXT.lengths(rows), SamplingParams(temperature=0))
        floor = step_floor(bench.config, bench.weight_bytes, rows, roofs)
        found[f"decode of {rows}"] = {
            "step_ms": seconds.scaled(1e3),
            "floor_to_step": rounded(floor / seconds),
            "idle_between_us": rounded(unused.between),
        }
    seconds, _ = bench.prefill(options.prompt)
    found[f"prefill of {options.prompt}"] = {"ms": seconds.scaled(1e3)}
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--rows", int, default=ROWS, help="of decode steps")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    targets = []
    with torch.inference_mode():
        roofs = measure_roofs()
        if "decode" in options.parts:
            for rows in options.rows:
                results[f"decode of {rows}"] = numbers = measure_decode(rows, roofs)
                if rows >= max(ROWS):
                    name = f"gated delta rule, {rows} rows, floor ÷ layer"
                    targets.append(at_least(name, numbers["floor_to_layer"], 0.8))
        if "prefill" in options.parts:
            results[f"prefill of {options.prompt}"] = measure_prefill(options.prompt, roofs)
    if "model" in options.parts:
        results[MODEL] = measure_model(options, roofs)
    print_result(results | {"targets": targets}, options, gpus=1)


if __name__ == "__main__":
    main()
