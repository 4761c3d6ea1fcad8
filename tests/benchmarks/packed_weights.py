"""Weights in 4 bits that stay packed, on one GPU, with random weights; prints JSON.

C: a device copy of the same run, bytes read and written a second.

products: one matrix in a CUDA graph, of so many copies that no cache holds them.
    to_bytes    time ÷ (bytes of the matrix / C)
    to_dense    time ÷ that of torch's product with the same matrix in bfloat16
steps: wall time of a decode step at CONTEXT positions a row, launched before the tokens of the one before are read.
    to_dense    time ÷ that of the model in bfloat16, where one GPU holds it
    to_floor    time ÷ (bytes of the weights that a step reads / C); experts: as many as even choices make
    bytes       that the weights take in memory
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.workers.kernels.choice import choose_packed_kernels
from tandem.workers.kernels.packed_linear import PackedLinear
from tests.benchmarks.contexts import Contexts
from tests.benchmarks.device_time import graph_seconds, measure_copy
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import ModelBench
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_most, guarded, print_result, print_skipped
from tests.benchmarks.timeline import record, slowest_kernels
from tests.support.packed_weights import random_packed

CONTEXT = 1024
PROFILED_STEPS = 4
CACHE_BYTES = 512 << 20  # of copies of a matrix, ten times what a GPU caches
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "attention_bias": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {**COMMON, **SHAPES["qwen3-8b"], "quantization_config": INT4},
    "gpt-oss-120b": {**GPT_OSS, "quantization_config": MXFP4},
}
MATRICES = ((4096, 4096), (24_576, 4096), (4096, 12_288))  # of Qwen3-8B
LIMITS = {
    ("qwen3-8b", 1): ("to_dense", 0.45),
    ("gpt-oss-120b", 1): ("to_floor", 1.3),
    ("gpt-oss-120b", 64): ("to_floor", 1.3),
}


def measure_products(rows: Sequence[int], copy: float) -> dict[str, Any]:
    kernels, found = choose_packed_kernels(torch.device("cuda"), torch.bfloat16), dict[str, Any]()
    for outputs, inputs in MATRICES:
        few = random_packed(8, inputs, group=128, dtype=torch.bfloat16)
        numbers, scales = (part.repeat(outputs // 8, 1).cuda() for part in (few.numbers, few.scales))
        size = numbers.nbytes + scales.nbytes
        copies = range(-(-CACHE_BYTES // size))
        packed = [PackedLinear(numbers.clone(), scales.clone(), None, None, None) for _ in copies]
        dense = torch.randn(len(copies) // 4 + 1, inputs, outputs, device="cuda", dtype=torch.bfloat16)
        for each in rows:
            x = torch.randn(each, inputs, device="cuda", dtype=torch.bfloat16)
            ours = graph_seconds(partial(multiply_all, kernels.linear, x, packed)) / len(packed)
            theirs = graph_seconds(partial(multiply_all, torch.mm, x, dense)) / len(dense)
            found[f"{outputs} x {inputs}, {each} rows"] = {
                "us": round(ours * 1e6, 1),
                "to_bytes": round(ours * copy / size, 3),
                "to_dense": round(ours / theirs, 3),
            }
    return found


def multiply_all(multiply: Callable[..., Tensor], x: Tensor, weights: Iterable[Any]) -> None:
    for one in weights:
        multiply(x, one)


def weight_bytes(fields: dict[str, Any], rows: int) -> float:
    """Returns the bytes that a step reads: for a dense model all but the embedding, for experts as many as even choices
    make."""
    hidden, layers, dense = fields["hidden_size"], fields["num_hidden_layers"], 2.0
    heads = (2 * fields["num_attention_heads"] + 2 * fields["num_key_value_heads"]) * fields["head_dim"]
    head = 2.0 * fields["vocab_size"] * hidden
    if "num_local_experts" not in fields:
        packed = (0.5 + 2 / 128) if "quantization_config" in fields else dense
        return head + packed * layers * hidden * (heads + 3 * fields["intermediate_size"])
    experts = fields["num_local_experts"]
    active = experts * (1 - (1 - fields["num_experts_per_tok"] / experts) ** rows)
    each = 3 * hidden * fields["intermediate_size"] * (0.5 + 1 / 32)
    return head + layers * (dense * hidden * heads + active * each)


def measure_steps(fields: dict[str, Any], rows: Sequence[int], copy: float, *, profile: bool = False) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    bench = ModelBench(fields, "cuda", sequences=max(rows), length=CONTEXT, chunk=CONTEXT)
    found: dict[str, Any] = {"bytes": torch.cuda.memory_allocated() - before - bench.pool_bytes}
    bench.capture_steps(max(rows))
    for each in rows:
        seconds: Measured = bench.decode(Contexts(str(CONTEXT)).lengths(each))
        found[str(each)] = {
            "ms": round(seconds * 1e3, 3),
            "to_floor": round(seconds * copy / weight_bytes(fields, each), 3),
        }
        if profile:
            print_kernels(bench, each)
    return found


def print_kernels(bench: ModelBench, rows: int) -> None:
    """Prints the slowest kernels on stderr, for people."""
    with bench.stored(Contexts(str(CONTEXT)).lengths(rows)) as ids:
        bench.step_once(ids)
        spans = record(lambda: [bench.step_once(ids) for _ in range(PROFILED_STEPS)])
    print(f"{rows} rows", *slowest_kernels(spans, PROFILED_STEPS), sep="\n", file=sys.stderr, flush=True)


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--models", choices=tuple(MODELS), default=tuple(MODELS))
    add_list(parser, "--rows", int, default=(1, 16, 64))
    add_list(parser, "--parts", choices=("products", "steps"), default=("products", "steps"))
    parser.add_argument("--profile", action="store_true", help="print the kernels of each step, the slowest first")
    options: argparse.Namespace = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    with torch.inference_mode():
        result = measure(options)
    print_result(result, options, gpus=1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    copy = measure_copy()
    result: dict[str, Any] = {"copy_tb_s": round(copy / 1e12, 2), "targets": []}
    if "products" in options.parts:
        result["products"] = guarded(lambda: measure_products(options.rows, copy))
    for name in options.models if "steps" in options.parts else ():
        fields = MODELS[name]
        found = result[name] = guarded(
            lambda fields=fields: measure_steps(fields, options.rows, copy, profile=options.profile)
        )
        if name == "qwen3-8b":
            plain = {key: value for key, value in fields.items() if key != "quantization_config"}
            result[f"{name} in bfloat16"] = dense = guarded(
                lambda plain=plain: measure_steps(plain, options.rows, copy)
            )
            for each in map(str, options.rows):
                if each in found and each in dense:
                    found[each]["to_dense"] = round(found[each]["ms"] / dense[each]["ms"], 3)
        for each in options.rows:
            metric, limit = LIMITS.get((name, each), ("", 0.0))
            if str(each) in found and metric:
                value = found[str(each)][metric]
                result["targets"].append(at_most(f"{name}, {each} rows, {metric}", value, limit))
    return result


if __name__ == "__main__":
    main()
