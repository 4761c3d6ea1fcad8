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
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Compression, IndexQuery, Limits
from tandem.workers.models.config import ModelConfig
from tandem.workers.runner.forward_graphs import Replay
from tests.benchmarks.compressed_shapes import KINDS, LAYERS, SHAPES, Fields
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.device_time import device_seconds
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import (
    ModelBench,
    captured,
    copy_rate,
    host_seconds,
    peak_bytes,
    release,
    synchronize,
)
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import Numbers, at_most, guarded, noted, print_result, print_skipped, rounded
from tests.benchmarks.timeline import record

ROWS = (1, 8)
PARTS = ("attention", "step", "prefill")
ROUNDS = 2  # of prompts that are timed
FLUSHED_MS = 100  # of all timed runs of a layer
REPEATS = 10  # one behind the other
KERNELS_SHOWN = 14
GIB = 1 << 30
ATTENTION_LIMIT = 2.0  # of the most rows at the longest context
GROWTH_LIMIT = 1.25
DENSE_LIMIT = 1.0


def read_bytes(config: ModelConfig, kind: str, lengths: Lengths) -> int:
    """Returns the bytes of stored entries that a layer of a decode step must read. lengths: int64 [rows], positions
    that a row sees."""
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
    """Random inputs of a decode step's attention, as a layer of V4 gives them."""

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


def step_attention(bench: ModelBench, ids: tuple[int, ...]) -> dict[str, Replay]:
    """Makes the attention of one layer for each kind, in a step of these sequences with graph buffers. The step is
    committed."""
    cache, config, rows = bench.cache, bench.config, len(ids)
    found = cache.graph_buffers([Limits.of_step(rows, config.num_heads, 1)])
    assert found, "the cache has no graph buffers for this step"
    forward = cache.begin(Batch(ids), found[0], [np.ones(rows, np.int64)])
    attention = found[0].attention()

    def of_layer(layer: int) -> Replay:
        x = LayerInputs(config, layer, rows, bench.device)
        return lambda: attention.attend_shared(layer, x.q, x.kv, x.sinks, x.compression)

    cache.commit(forward)
    synchronize(bench.device)  # the buffers' memory on the host goes with them
    return {kind: of_layer(LAYERS.index(kind)) for kind in KINDS}


def seconds_of(run: Replay, device: torch.device) -> Measured:
    """Measures a replay. On a GPU with flushed caches."""
    return device_seconds(run, FLUSHED_MS) if device.type == "cuda" else host_seconds(run)


def kernels_of(run: Callable[[], object], device: torch.device) -> Numbers:
    """µs of each kernel, the longest ones first, and of all of them; nothing on a CPU."""

    def waited() -> None:
        run()
        synchronize(device)

    waited()
    if device.type != "cuda":
        return {}
    times = Counter[str]()
    for span in record(waited):
        times[span.name[:60]] += span.end - span.begin  # pyright: ignore[reportArgumentType]  # counts may be floats
    shown = {name: rounded(spent) for name, spent in times.most_common(KERNELS_SHOWN)}
    return {"kernels_us": {"all": rounded(sum(times.values())), **shown}}


def measure_attention(bench: ModelBench, context: int, rows: int, copy: float, kernels: bool) -> Numbers:
    """Measures each kind for a token after `context` positions, and for a token that is the last of them."""
    result: Numbers = {}
    with bench.stored(np.full(rows, context)) as ids:
        for kind, attend in step_attention(bench, ids).items():
            floor = read_bytes(bench.config, kind, np.full(rows, context + 1)) / copy
            result[kind] = guarded(partial(timed_attention, bench, attend, floor, kernels))
    with bench.stored(np.full(rows, context - 1)) as ids:
        for kind, attend in step_attention(bench, ids).items():
            if kind != "window" and "error" not in result[kind]:
                result[kind] |= guarded(partial(completing, bench, attend))
    return result


def timed_attention(bench: ModelBench, attend: Replay, floor: float, kernels: bool) -> Numbers:
    def repeat() -> Tensor:
        for _ in range(REPEATS - 1):
            attend()
        return attend()

    replay = captured(attend, bench.device)
    seconds = seconds_of(replay, bench.device)
    again = seconds_of(captured(repeat, bench.device), bench.device)
    return {
        "us": seconds.scaled(1e6),
        "floor_us": rounded(floor * 1e6),
        "to_floor": seconds.scaled(1 / floor),
        "repeated_us": again.scaled(1e6 / REPEATS),
        **(kernels_of(replay, bench.device) if kernels else {}),
    }


def completing(bench: ModelBench, attend: Replay) -> Numbers:
    return {"completing_us": seconds_of(captured(attend, bench.device), bench.device).scaled(1e6)}


def measure_step(bench: ModelBench, context: int, rows: int, kernels: bool) -> Numbers:
    lengths = np.full(rows, context)
    result: Numbers = {"ms": bench.decode(lengths).scaled(1e3)}
    if kernels:
        with bench.stored(lengths) as ids:
            result |= kernels_of(lambda: bench.step_once(ids), bench.device)
    return result


def measure_prefill(bench: ModelBench, options: argparse.Namespace) -> Numbers:
    length, chunk = options.prompt, options.chunk
    seconds = bench.prefill(length, chunk, ROUNDS)
    result: Numbers = {"s": seconds, "tokens_per_s": rounded(length / seconds)}
    if options.kernels:
        result |= kernels_of(lambda: bench.prompt(length, chunk), bench.device)
    return result


def measure_compressed(result: Numbers, options: argparse.Namespace, budget: Budget, copy: float) -> Numbers:
    """V4's layers into `result`, each part as far as the budget goes. Of the model: how large it is."""
    shape, kernels = SHAPES[options.shape], options.kernels
    length = max([*options.contexts, options.prompt])
    bench = ModelBench(
        shape.compressed, options.device, sequences=max(options.rows), length=length, chunk=options.chunk
    )
    cases = [(rows, context) for rows in options.rows for context in options.contexts]
    for rows, context in budget.within(cases if "attention" in options.parts else (), least=0):
        noted(result, attention_title(rows, context), partial(measure_attention, bench, context, rows, copy, kernels))
    if "step" in options.parts and not budget.is_spent:
        measure_steps(result, bench, options, budget)
    if "prefill" in options.parts and not budget.is_spent:
        noted(result, prefill_title(options), partial(measure_prefill, bench, options))
    return {"pool_gib": rounded(bench.pool_bytes / GIB), "peak_gib": rounded(peak_bytes(bench.device) / GIB)}


def measure_steps(result: Numbers, bench: ModelBench, options: argparse.Namespace, budget: Budget) -> None:
    capture = noted(result, "capture", lambda: {"s": rounded(bench.capture_steps(max(options.rows)))})
    if "error" in capture:
        return
    for rows, context in budget.within([(rows, one) for rows in options.rows for one in options.contexts], least=0):
        noted(result, step_title(rows, context), partial(measure_step, bench, context, rows, options.kernels))
    for rows in options.rows:
        short, long = (result.get(step_title(rows, one), {}).get("ms") for one in extremes(options.contexts))
        if len(options.contexts) > 1 and short is not None and long is not None:
            result[growth_title(rows)] = rounded(long / short)


def measure_dense(options: argparse.Namespace) -> Numbers:
    release(torch.device(options.device))
    fields: Fields = SHAPES[options.shape].dense
    bench = ModelBench(fields, options.device, sequences=1, length=options.prompt, chunk=options.chunk)
    return measure_prefill(bench, options)


def attention_title(rows: int, context: int) -> str:
    return f"attention of {rows} at {context}"


def step_title(rows: int, context: int) -> str:
    return f"step of {rows} at {context}"


def growth_title(rows: int) -> str:
    return f"growth of a step of {rows}"


def prefill_title(options: argparse.Namespace) -> str:
    return f"prefill of {options.prompt} by {options.chunk}"


def extremes(contexts: list[int]) -> tuple[int, int]:
    return min(contexts), max(contexts)


def targets_of(result: Numbers, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the targets of the parts that were measured."""
    targets, (_, longest), rows = [], extremes(options.contexts), max(options.rows)
    for kind in ("HCA", "CSA"):
        ratio = result.get(attention_title(rows, longest), {}).get(kind, {}).get("to_floor")
        if ratio is not None:
            targets.append(at_most(f"{kind}, attention of {rows} at {longest} ÷ floor", ratio, ATTENTION_LIMIT))
    for one in options.rows:
        growth = result.get(growth_title(one))
        if growth is not None:
            name = "step of {}, {} ÷ {} positions".format(one, *extremes(options.contexts)[::-1])
            targets.append(at_most(name, growth, GROWTH_LIMIT))
    to_dense = result.get(prefill_title(options), {}).get("to_dense")
    if to_dense is not None:
        targets.append(at_most(f"{prefill_title(options)} ÷ dense", to_dense, DENSE_LIMIT))
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
    result: Numbers = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "case": options.shape}
    result |= {"cut": SHAPES[options.shape].cut, "copy_gb_per_s": rounded(copy / 1e9)}
    with torch.inference_mode():
        noted(result, "model", lambda: measure_compressed(result, options, budget, copy))
        if "prefill" in options.parts and not budget.is_spent:
            ours, dense = result.get(prefill_title(options), {}), partial(measure_dense, options)
            theirs = noted(result, f"dense {prefill_title(options)}", dense)
            if "s" in ours and "s" in theirs:
                ours["to_dense"] = rounded(ours["s"] / theirs["s"])
    print_result(result | {"targets": targets_of(result, options)}, options, gpus=int(on_gpu))


if __name__ == "__main__":
    main()
