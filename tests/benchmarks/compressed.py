"""DeepSeek-V4's layers with few of them on one GPU, no cluster: attention, whole steps and prompts; prints JSON.

C: a device copy, bytes read and written a second.

attention: one layer of a decode step, as its graph calls it: rotates, stores, compresses, chooses and attends. Of a
    layer with a window alone, with entries of 128 positions (HCA), and with chosen entries of 4 (CSA).
    to_floor      time with flushed caches ÷ bytes that must be read / C: the window, all entries of HCA, and of CSA
                  the chosen ones and all index keys
    repeated_us   one behind the other, caches warm
    completing_us of a token that completes an entry
step: a decode step of all layers in a CUDA graph, launched before the tokens of the one before are read.
    growth        the longest context ÷ the shortest: it should grow with what is chosen, not with all positions
prefill: chunks of a lone prompt up to its first token; beside the same of a dense model with as many layers, heads and
    experts, whose latents of all positions are attended to (DeepSeek-V3). On a GPU each token of V4's chunk reads its
    own window and entries.

Random weights and KV. `cut` says what is smaller than in the model. On a CPU, where timings say nothing about a GPU:
--shape tiny --device cpu. A case that fails has an `error`, and the others go on. kernels_us, of --kernels: µs of each
kernel in one layer, one step or one prompt.
"""

import argparse
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Compression, IndexQuery, Limits
from tandem.workers.models.config import ModelConfig
from tandem.workers.runner.forward_graphs import Replay
from tests.benchmarks.compressed_bench import CompressedBench, captured, synchronize
from tests.benchmarks.compressed_shapes import KINDS, LAYERS, SHAPES, Fields
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.device_time import device_seconds, graph_seconds, measure_copy
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded
from tests.benchmarks.timeline import record

ROWS = (1, 8)
PARTS = ("attention", "step", "prefill")
ROUNDS = 2  # of prompts that are timed
FLUSHED_MS = 100  # of all timed runs of a layer
CPU_RUNS = 3
CPU_COPY_BYTES = 64 << 20
KERNELS_SHOWN = 14
ATTENTION_LIMIT = 2.0  # of the most rows at the longest context
GROWTH_LIMIT = 1.25
DENSE_LIMIT = 1.0

Numbers = dict[str, Any]


def read_bytes(config: ModelConfig, kind: str, lengths: Lengths) -> int:
    """What a layer of a decode step must read of what is stored. lengths: int64 [rows], positions that a row sees."""
    compressed, size = config.compressed, config.dtype.itemsize
    assert compressed is not None
    head = config.head_dim * size
    window = int(np.minimum(lengths, compressed.window).sum()) * head
    if kind == "window":
        return window
    entries = lengths // dict(compressed.rates)[KINDS[kind]]
    if kind == "HCA":
        return window + int(entries.sum()) * head
    index = compressed.index
    keys = int(entries[entries > index.top_k].sum()) * index.head_dim * size
    return window + int(np.minimum(entries, index.top_k).sum()) * head + keys


class LayerInputs:
    """Of a decode step's tokens, random: what a layer of V4 gives to its attention."""

    def __init__(self, config: ModelConfig, layer: int, rows: int, device: torch.device) -> None:
        compressed, size = config.compressed, config.head_dim
        assert compressed is not None

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        self.q = draw(rows, config.num_heads, size, dtype=config.dtype)
        self.kv = draw(rows, 1, size, dtype=config.dtype)
        self.sinks = draw(config.num_heads)
        self.compression = None
        every = compressed.every(layer)
        if every is None:
            return
        width, norms, query = compressed.input_width(layer, size), [size], None
        if compressed.chooses(layer):
            index = compressed.index
            norms.append(index.head_dim)
            queries = draw(rows, index.num_heads, index.head_dim, dtype=config.dtype)
            query = IndexQuery(queries, draw(rows, index.num_heads))
        weights = tuple(torch.ones(one, dtype=config.dtype, device=device) for one in norms)
        values = draw(rows, width), draw(rows, width), draw(every, width)
        self.compression = Compression(*values, weights, config.rms_norm_eps, query)


def step_attention(bench: CompressedBench, ids: tuple[int, ...]) -> dict[str, Replay]:
    """Of each kind the attention of one layer in a step of these sequences, in graph buffers. The step is committed."""
    cache, config, rows = bench.cache, bench.config, len(ids)
    found = cache.graph_buffers([Limits.of_step(rows, config.num_heads, 1)])
    assert found, "the cache has no graph buffers for this step"
    forward = cache.begin(Batch(ids), found[0], [np.ones(rows, np.int64)])
    attention = found[0].attention()

    def of_layer(layer: int) -> Replay:
        x = LayerInputs(config, layer, rows, bench.device)
        return lambda: attention.attend_shared(layer, x.q, x.kv, x.sinks, x.compression)

    layers = [of_layer(layer) for layer in range(config.num_layers)]
    for attend in layers:
        attend()
    cache.commit(forward)
    return {kind: layers[LAYERS.index(kind)] for kind in KINDS}


def seconds_of(run: Replay, device: torch.device) -> Measured:
    """Of a replay. On a GPU with flushed caches."""
    return device_seconds(run, FLUSHED_MS) if device.type == "cuda" else host_seconds(run)


def host_seconds(run: Callable[[], object]) -> Measured:
    times = []
    for _ in range(CPU_RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return Measured.median(times)


def copy_rate(device: torch.device) -> float:
    """C."""
    if device.type == "cuda":
        return measure_copy()
    source = torch.zeros(CPU_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * CPU_COPY_BYTES / host_seconds(lambda: target.copy_(source))


def kernels_of(run: Callable[[], object], device: torch.device) -> Numbers:
    """µs of each kernel, the longest ones first, and of all of them."""
    if device.type != "cuda":
        return {}

    def waited() -> None:
        run()
        synchronize(device)

    waited()
    times = Counter[str]()
    for span in record(waited):
        times[span.name[:60]] += span.end - span.begin  # pyright: ignore[reportArgumentType]  # counts may be floats
    shown = {name: rounded(spent) for name, spent in times.most_common(KERNELS_SHOWN)}
    return {"kernels_us": {"all": rounded(sum(times.values())), **shown}}


def measure_attention(bench: CompressedBench, context: int, rows: int, copy: float, kernels: bool) -> Numbers:
    """Of each kind, of a token behind `context` positions, and of one that is the last of them."""
    result: Numbers = {}
    with bench.stored(np.full(rows, context)) as ids:
        for kind, attend in step_attention(bench, ids).items():
            floor = read_bytes(bench.config, kind, np.full(rows, context + 1)) / copy
            result[kind] = guarded(lambda: timed_attention(bench, attend, floor, kernels))  # noqa: B023  # called here
    with bench.stored(np.full(rows, context - 1)) as ids:
        for kind, attend in step_attention(bench, ids).items():
            if kind != "window" and "error" not in result[kind]:
                completing = seconds_of(captured(attend, bench.device), bench.device)
                result[kind]["completing_us"] = completing.scaled(1e6)
    return result


def timed_attention(bench: CompressedBench, attend: Replay, floor: float, kernels: bool) -> Numbers:
    replay = captured(attend, bench.device)
    seconds = seconds_of(replay, bench.device)
    again = graph_seconds(attend) if bench.device.type == "cuda" else seconds
    return {
        "us": seconds.scaled(1e6),
        "floor_us": rounded(floor * 1e6),
        "to_floor": seconds.scaled(1 / floor),
        "repeated_us": again.scaled(1e6),
        **(kernels_of(replay, bench.device) if kernels else {}),
    }


def measure_step(bench: CompressedBench, context: int, rows: int, kernels: bool) -> Numbers:
    lengths = np.full(rows, context)
    result: Numbers = {"ms": bench.decode(lengths).scaled(1e3)}
    if kernels:
        with bench.stored(lengths) as ids:
            result |= kernels_of(lambda: bench.step_once(ids), bench.device)
    return result


def measure_prefill(bench: CompressedBench, length: int, chunk: int, kernels: bool) -> Numbers:
    seconds = bench.prefill(length, chunk, ROUNDS)
    result: Numbers = {"s": seconds, "tokens_per_s": rounded(length / seconds)}
    if kernels:
        result |= kernels_of(lambda: bench.prefill(length, chunk, 0), bench.device)
    return result


def guarded(run: Callable[[], Numbers]) -> Numbers:
    """What it returns, or the error that it raises."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def measure_compressed(options: argparse.Namespace, budget: Budget, copy: float) -> Numbers:
    """Of V4's layers; of each part as far as the budget goes."""
    longest = max([*options.contexts, options.prompt])
    bench = CompressedBench(
        SHAPES[options.shape].compressed,
        options.device,
        sequences=max(options.rows),
        length=longest,
        chunk=options.chunk,
    )
    result: Numbers = {"pool_gib": rounded(bench.pool_bytes / (1 << 30))}
    cases = [(rows, context) for rows in options.rows for context in options.contexts]
    for rows, context in budget.within(cases if "attention" in options.parts else (), least=0):
        measured = guarded(lambda: measure_attention(bench, context, rows, copy, options.kernels))  # noqa: B023
        result[f"attention of {rows} at {context}"] = measured
    if "step" in options.parts and not budget.is_spent:
        result["capture"] = guarded(lambda: {"s": rounded(bench.capture_steps(max(options.rows)))})
        steps = cases if "error" not in result["capture"] else ()
        for rows, context in budget.within(steps, least=0):
            result[step_title(rows, context)] = guarded(
                lambda: measure_step(bench, context, rows, options.kernels)  # noqa: B023
            )
        for rows in options.rows:
            ends = [result.get(step_title(rows, context), {}).get("ms") for context in extremes(options.contexts)]
            if len(options.contexts) > 1 and None not in ends:
                result[f"growth of a step of {rows}"] = rounded(ends[1] / ends[0])
    if "prefill" in options.parts and not budget.is_spent:
        result[f"prefill of {options.prompt}"] = guarded(
            lambda: measure_prefill(bench, options.prompt, options.chunk, options.kernels)
        )
    return result


def measure_dense(options: argparse.Namespace) -> Numbers:
    fields: Fields = SHAPES[options.shape].dense
    bench = CompressedBench(fields, options.device, sequences=1, length=options.prompt, chunk=options.chunk)
    return measure_prefill(bench, options.prompt, options.chunk, options.kernels)


def step_title(rows: int, context: int) -> str:
    return f"step of {rows} at {context}"


def extremes(contexts: list[int]) -> tuple[int, int]:
    return min(contexts), max(contexts)


def targets_of(result: Numbers, options: argparse.Namespace) -> list[dict[str, Any]]:
    """As far as it was measured."""
    targets, (_, longest), rows = [], extremes(options.contexts), max(options.rows)
    for kind in ("HCA", "CSA"):
        ratio = result.get(f"attention of {rows} at {longest}", {}).get(kind, {}).get("to_floor")
        if ratio is not None:
            targets.append(at_most(f"{kind}, attention of {rows} at {longest} ÷ floor", ratio, ATTENTION_LIMIT))
    for one in options.rows:
        growth = result.get(f"growth of a step of {one}")
        if growth is not None:
            name = "step of {}, {} ÷ {} positions".format(one, *extremes(options.contexts)[::-1])
            targets.append(at_most(name, growth, GROWTH_LIMIT))
    to_dense = result.get(f"prefill of {options.prompt}", {}).get("to_dense")
    if to_dense is not None:
        targets.append(at_most(f"prefill of {options.prompt} ÷ dense", to_dense, DENSE_LIMIT))
    return targets


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="v4")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_list(parser, "--rows", int, default=ROWS, help="of attention and steps")
    add_list(parser, "--contexts", int, help="positions of a row; default: the shape's")
    parser.add_argument("--prompt", type=int, help="tokens; default: the shape's")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt in one forward; default: the shape's")
    parser.add_argument("--kernels", action="store_true", help="also µs of each kernel")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_seconds(parser)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    options.contexts = options.contexts or list(shape.contexts)
    options.prompt, options.chunk = options.prompt or shape.prompt, options.chunk or shape.chunk
    return options


def main() -> None:
    options = parse_options()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    budget, copy = Budget(options.seconds), copy_rate(torch.device(options.device))
    result: Numbers = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "shape": options.shape}
    result |= {"cut": SHAPES[options.shape].cut, "copy_gb_per_s": rounded(copy / 1e9)}
    with torch.inference_mode():
        result |= guarded(lambda: measure_compressed(options, budget, copy))
        gc.collect()  # graphs, weights and pools
        if on_gpu:
            torch.cuda.empty_cache()
        title = f"prefill of {options.prompt}"
        if "prefill" in options.parts and not budget.is_spent:
            dense = result[f"dense {title}"] = guarded(lambda: measure_dense(options))
            if "s" in dense and "s" in result.get(title, {}):
                result[title]["to_dense"] = rounded(result[title]["s"] / dense["s"])
    print_result(result | {"targets": targets_of(result, options)}, options, gpus=int(on_gpu))


if __name__ == "__main__":
    main()
