"""Decode steps with LoRA adapters on one GPU, no cluster: what each row's adapter adds, in a CUDA graph; prints JSON.

base      a worker without adapters (adapters.max_resident 0)
without   one that serves them, a step whose rows have none
with      a step whose rows have ADAPTERS adapters of rank RANK in turn, each of all products of the model
alone     a step whose rows have one adapter
Milliseconds of a step that is launched before the tokens of the one before are read, by rounds that take turns. `cut`
says what is smaller than in the model. Random weights, KV and adapters. On a CPU, without graphs, timings say nothing
about a GPU: --shape tiny --device cpu.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tandem.workers.config import AdapterSettings
from tandem.workers.models.weights import NO_ADAPTERS
from tandem.workers.sampling.sample_batch import SampleBatch
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import GREEDY, ModelBench
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.results import Numbers, at_most, print_result, print_skipped, rounded
from tests.benchmarks.step_bench import SEGMENT, STEPS, WARM_STEPS, step_times

ADAPTERS, RANK, LAYERS, ROUNDS = 8, 16, 8, 3
WITHOUT_LIMIT, WITH_LIMIT = 1.01, 1.15
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def fields_of(shape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json, and what of it is smaller than the model's."""
    if shape == "tiny":
        return COMMON | TINY | {"num_hidden_layers": 2}, {"model": "none"}
    fields = COMMON | SHAPES[shape]
    return fields | {"num_hidden_layers": LAYERS}, {"num_hidden_layers": [LAYERS, fields["num_hidden_layers"]]}


class AdapterBench:
    """One model with slots for adapters, or without."""

    def __init__(self, shape: str, device: str, rows: int, context: int, adapters: AdapterSettings) -> None:
        fields, _ = fields_of(shape)
        self.bench = ModelBench(fields, device, sequences=rows, length=context, chunk=rows, adapters=adapters)
        self.contexts = np.full(rows, context)
        self.capture_seconds = self.bench.capture_steps(rows) if device == "cuda" else 0.0

    def step(self, digests: Sequence[bytes] = ()) -> Measured:
        """Seconds of a step whose rows have these adapters in turn."""
        bench, first = self.bench, self.contexts - WARM_STEPS - STEPS // 2
        sampling = SampleBatch.from_params([GREEDY] * first.size)
        with bench.stored(first) as ids:
            for index, sequence in enumerate(ids if digests else ()):
                assert bench.adapters is not None
                bench.adapters.take(sequence, digests[index % len(digests)])
            step_times(bench.runner, ids, sampling, first, WARM_STEPS)
            times = step_times(bench.runner, ids, sampling, first + WARM_STEPS, STEPS)
            for sequence in ids if digests else ():
                assert bench.adapters is not None
                bench.adapters.release(sequence)
        segments = [(end - begin) / SEGMENT for begin, end in pairwise(times[::SEGMENT])]
        return Measured.of((times[-1] - times[0]) / STEPS, segments)


def measure(shape: str, device: str, rows: int, context: int) -> Numbers:
    base = AdapterBench(shape, device, rows, context, NO_ADAPTERS)
    served = AdapterBench(shape, device, rows, context, AdapterSettings(ADAPTERS, RANK))
    digests = served.bench.digests
    cases: dict[str, Callable[[], Measured]] = {
        "base": base.step,
        "without": served.step,
        "with": lambda: served.step(digests),
        "alone": lambda: served.step(digests[:1]),
    }
    rounds = [{name: run() for name, run in cases.items()} for _ in range(ROUNDS)]
    seconds = {name: Measured.median([one[name] for one in rounds]) for name in cases}
    ratios = {name: seconds[name] / seconds["base"] for name in ("without", "with", "alone")}
    slot_bytes = served.bench.adapters.held[0].bytes if served.bench.adapters is not None else 0
    return {
        "shape": shape,
        "cut": fields_of(shape)[1],
        "rows": rows,
        "context": context,
        "adapters": ADAPTERS,
        "rank": RANK,
        "adapter_bytes": slot_bytes,
        "step_ms": {name: rounded(1e3 * one) for name, one in seconds.items()},
        "to_base": {name: rounded(one) for name, one in ratios.items()},
        "capture_seconds": {"base": rounded(base.capture_seconds), "served": rounded(served.capture_seconds)},
        "targets": [
            at_most("a step without adapters ÷ the base's", ratios["without"], WITHOUT_LIMIT),
            at_most(f"a step with {ADAPTERS} adapters of rank {RANK} ÷ the base's", ratios["with"], WITH_LIMIT),
        ],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=["tiny", *SHAPES])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    result = measure(options.shape, options.device, options.rows, options.context)
    print_result(result, options, gpus=int(options.device == "cuda"))


if __name__ == "__main__":
    main()
