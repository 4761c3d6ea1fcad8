"""Decode and prefill over KV in 8 bits against bfloat16, Qwen3-8B's shapes, one GPU; prints JSON.

decode attention: one layer of a decode step through the cache's kernels in a CUDA graph, norm, rotation and append
included, 16 sequences of 32K on shuffled pages; roof: C, a device copy of the same run. chunk: attention of a prompt's
chunk behind 8K. speed-up: time over bfloat16 ÷ time over FP8. step: the whole model's decode step, run ahead.
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import QKV, DeviceTables, GroupPlan, Limits
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.upload import upload
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens, look_up_pages
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.device_time import device_seconds, measure_copy
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import SHAPES, shape_name
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, print_result, print_skipped, rounded
from tests.benchmarks.step_bench import Bench, random_pool

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 2
ROWS, CONTEXT = 16, 32768
CACHED, CHUNKS = 8192, (128, 512, 4096)
MODEL = "qwen3-8b"
PARTS = ("attention", "chunks", "step")
K_SCALE, V_SCALE = 0.02, 0.03
KINDS = ("bfloat16", "fp8")

Qkv = tuple[Tensor, Tensor, Tensor]


def layout_of(kind: str) -> KVLayout:
    group = LayerGroup(tuple(range(LAYERS)), KV(KV_HEADS, HEAD_DIM))
    scales = KVScales.uniform(LAYERS, K_SCALE, V_SCALE) if kind == "fp8" else None
    return KVLayout((group,), PAGE_SIZE, torch.bfloat16, scales)


def prepare(kind: str, sequences: int, cached: int, new: int) -> tuple[AppendThenAttend, TokenLayout, PageTables, Qkv]:
    """Sequences with `cached` positions each, on shuffled pages, append `new` ones each."""
    layout, device = layout_of(kind), torch.device("cuda")
    pages_each = -(-(cached + new) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(sequences * pages_each).astype(np.int32).reshape(sequences, -1)
    tokens = lay_out_tokens(np.full(sequences, cached), np.full(sequences, new))
    tables = look_up_pages(table, np.arange(sequences), tokens, PAGE_SIZE)
    pool = random_pool((table.size, *layout.page_shape(0)), layout.stored_dtype)
    kernels = choose_kernels(pool, Scoring(HEAD_DIM**-0.5), fp8=Fp8Entries.of_group(layout, 0, device))
    rows = torch.randn(sequences * new, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    q, k, v = rows.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
    return kernels, tokens, tables, (q, k, v)


def chunk_seconds(kind: str, new: int) -> Measured:
    """Attention of one layer."""
    kernels, tokens, tables, (q, k, v) = prepare(kind, 1, CACHED, new)
    plan = kernels.plan(tokens, tables)
    q, k = kernels.append(1, q, k, v, None, plan)
    return device_seconds(lambda: kernels.attend(1, q, k, v, plan))


def decode_seconds(kind: str, rows: int, context: int) -> Measured:
    """Measures the work between one layer's products in a decode step."""
    kernels, tokens, tables, (q, k, v) = prepare(kind, rows, context - 1, 1)
    arrays = (tables.slot_mapping, tables.kv_indptr, tables.kv_last_page_len, tables.kv_indices)
    buffers = kernels.buffers(Limits.of_step(rows, Q_HEADS, 0), DeviceTables(*upload(arrays, q.device)))
    rotation = Rotation(torch.randn(rows, 2, HEAD_DIM, device=q.device, dtype=q.dtype))
    norm = HeadNorm(
        torch.ones(Q_HEADS + KV_HEADS, HEAD_DIM, device=q.device, dtype=q.dtype), 1e-6, lambda heads, *_: heads
    )
    buffers.plan(tokens, tables)
    plan = GroupPlan(buffers, rotation, num_tokens=rows, captured=True)
    buffers.begin_captured()  # once for all layers of a step, so it is not measured
    buffers.run(plan, 1, QKV(q, k, v, None, norm))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.run(plan, 1, QKV(q, k, v, None, norm))
    return device_seconds(graph.replay)


def compare(seconds: Callable[[str], Measured], unit: str = "us", scale: float = 1e6) -> dict[str, float]:
    plain, fp8 = map(seconds, KINDS)
    found = {f"bfloat16_{unit}": plain.scaled(scale), f"fp8_{unit}": fp8.scaled(scale)}
    return found | {"speed_up": rounded(plain / fp8)}


def compare_decode(rows: int, context: int) -> dict[str, float]:
    found = compare(partial(decode_seconds, rows=rows, context=context))
    rate = rows * context * 2 * KV_HEADS * HEAD_DIM / found["fp8_us"] * 1e6
    return found | {"fp8_of_C": rounded(rate / measure_copy())}


def step_seconds(kind: str, model: str, rows: int, context: int) -> Measured:
    num_layers = int(SHAPES[model]["num_hidden_layers"])
    scales = KVScales.uniform(num_layers, K_SCALE, V_SCALE) if kind == "fp8" else None
    bench = Bench(model, rows, rows * (context + 512), scales)
    seconds, _ = bench.decode(np.full(rows, context), SamplingParams(temperature=0))
    del bench
    gc.collect()  # the next one needs the memory
    torch.cuda.empty_cache()
    return seconds


def measure(options: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    rows, context, found = options.rows, options.context, dict[str, Any]()
    with torch.inference_mode():
        if "attention" in options.parts:
            found[f"decode attention of {rows} at {context}"] = compare_decode(rows, context)
        for new in budget.within(CHUNKS if "chunks" in options.parts else (), least=0):
            found[f"chunk of {new} behind {CACHED}"] = compare(partial(chunk_seconds, new=new))
    if "step" in options.parts and not budget.is_spent:
        step = partial(step_seconds, model=options.model, rows=rows, context=context)
        found[f"decode step of {options.model}, {rows} at {context}"] = compare(step, "ms", 1e3)
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", type=shape_name, choices=list(SHAPES), default=MODEL, help="of the whole step")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_seconds(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    found = measure(options, Budget(options.seconds))
    decode = found.get(f"decode attention of {ROWS} at {CONTEXT}")
    targets = [at_least("decode attention over FP8, speed-up over bfloat16", decode["speed_up"], 1.6)] if decode else []
    print_result({"device": torch.cuda.get_device_name(), **found, "targets": targets}, options, gpus=1)


if __name__ == "__main__":
    main()
