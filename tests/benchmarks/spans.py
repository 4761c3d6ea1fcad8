"""Models whose layers see a window or a chunk, with few layers on one GPU, no cluster: decode steps, and prompts behind
a prefix that is cached; prints JSON.

C: a device copy, bytes read and written a second.

step of n at c   a decode step of n sequences that have stored c positions each, launched before the tokens of the one
                 before are read; on a GPU in a CUDA graph
    to_floor     ÷ (weights + KV of the positions that each layer sees) / C. Of experts those that n tokens choose on
                 average, if each is as likely
prefix of p      a prompt of p tokens that another sequence has published, and OWN more
    whole_s      seconds to the first token without a match, hit_s with it
    hit_to_whole ÷ those without

Random weights and KV. `cut` says what is smaller than in the model. On a CPU, where timings say nothing about a GPU:
--tiny --device cpu. A case that fails has an `error`, and the others go on.
"""

import argparse
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tandem.cache.plan.spans import Span
from tandem.workers.models.config import ModelConfig
from tests.benchmarks.compressed_shapes import Fields
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import ModelBench, copy_rate, release
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import Numbers, noted, print_result, print_skipped, rounded
from tests.benchmarks.span_shapes import SHAPES

ROWS, CONTEXTS, PREFIX = (1, 16, 64), (1024, 16_384), 8192
TINY_ROWS, TINY_CONTEXTS, TINY_PREFIX = (2,), (128,), 96
OWN = 256  # tokens behind a prefix
CHUNK = 8192
ROUNDS = 3
EXPERTS = ".experts."  # in names of their weights


def seen(span: Span, lengths: Lengths) -> int:
    """Positions that a token behind each of `lengths` sees, its own included, of all rows together."""
    return int((lengths + 1 - span.first_needed(lengths)).sum())


def kv_bytes(config: ModelConfig, lengths: Lengths) -> int:
    """Returns the bytes of KV that a decode step reads; states are none. lengths: int64 [rows], positions stored."""
    heads = [config.heads_of(layer) for layer in range(config.num_layers)]
    pairs = [(one, span) for one, span in zip(heads, config.layer_spans, strict=True) if not span.last]
    return sum(2 * one.num_kv_heads * one.head_dim * seen(span, lengths) for one, span in pairs) * config.dtype.itemsize


class Weights(NamedTuple):
    """Elements that decode steps read: all but the embedding, of which they take a row for each token."""

    shared: int
    experts: int  # of all experts together


def count_weights(fields: Fields) -> Weights:
    """fields: config.json."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, fields["architectures"][0])(transformers.AutoConfig.for_model(**fields))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    unread = 0 if model.config.tie_word_embeddings else embedding.weight.numel()
    experts = sum(one.numel() for name, one in model.named_parameters() if EXPERTS in name)
    return Weights(sum(one.numel() for one in model.parameters()) - experts - unread, experts)


def weight_bytes(config: ModelConfig, weights: Weights, rows: int) -> float:
    """Returns the bytes of weights that a decode step reads."""
    chosen = 0.0 if config.moe is None else 1 - (1 - config.moe.routing.top_k / config.moe.num_experts) ** rows
    return (weights.shared + chosen * weights.experts) * config.dtype.itemsize


def measure_step(bench: ModelBench, weights: Weights, context: int, rows: int, copy: float) -> Numbers:
    lengths = np.full(rows, context)
    seconds = bench.decode(lengths)
    floor = (weight_bytes(bench.config, weights, rows) + kv_bytes(bench.config, lengths)) / copy
    return {"ms": seconds.scaled(1e3), "floor_ms": rounded(floor * 1e3), "to_floor": seconds.scaled(1 / floor)}


def measure_prefix(bench: ModelBench, prefix: int) -> Numbers:
    tokens = np.random.default_rng(0).integers(0, bench.config.vocab_size, prefix + OWN)
    with bench.published(tokens[:prefix], CHUNK):
        whole, hit = (
            Measured.median([bench.first_token(tokens, CHUNK, matches=matches) for _ in range(ROUNDS + 1)][1:])
            for matches in (False, True)
        )
    return {"whole_s": whole, "hit_s": hit, "hit_to_whole": rounded(hit / whole)}


def measure(name: str, options: argparse.Namespace, budget: Budget, copy: float) -> Numbers:
    """Measures one model, as far as the budget goes."""
    shape, result = SHAPES[name], Numbers()
    fields = shape.fields(tiny=options.tiny)
    weights = count_weights(fields)
    longest = max([*options.contexts, options.prefix + OWN])
    bench = ModelBench(fields, options.device, sequences=max(2, *options.rows), length=longest, chunk=CHUNK)
    noted(result, f"prefix of {options.prefix}", partial(measure_prefix, bench, options.prefix))
    if bench.device.type == "cuda":
        capture = noted(result, "capture", lambda: {"s": rounded(bench.capture_steps(max(options.rows)))})
        if "error" in capture:
            return result
    for rows, context in budget.within([(rows, one) for rows in options.rows for one in options.contexts], least=0):
        noted(result, f"step of {rows} at {context}", partial(measure_step, bench, weights, context, rows, copy))
    return result if options.tiny else {"cut": shape.cut, **result}


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few layers that a CPU computes")
    add_list(parser, "--models", default=list(SHAPES), choices=list(SHAPES))
    add_list(parser, "--rows", int, help="sequences of a step")
    add_list(parser, "--contexts", int, help="positions of a sequence")
    parser.add_argument("--prefix", type=int, help="tokens")
    add_seconds(parser)
    options = parser.parse_args()
    options.rows = options.rows or (TINY_ROWS if options.tiny else ROWS)
    options.contexts = options.contexts or (TINY_CONTEXTS if options.tiny else CONTEXTS)
    options.prefix = options.prefix or (TINY_PREFIX if options.tiny else PREFIX)
    return options


def main() -> None:
    options = parse_options()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    budget, copy = Budget(options.seconds), copy_rate(device)
    result: Numbers = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "copy_gb_per_s": rounded(copy / 1e9),
    }
    with torch.inference_mode():
        for name in budget.within(options.models):
            noted(result, name, partial(measure, name, options, budget, copy))
            release(device)
    print_result(result, options, gpus=int(on_gpu))


if __name__ == "__main__":
    main()
