"""Measures what drafts by a layer for multi-token prediction cost a request, unloaded, through gRPC: a cluster without
it, one with `speculation.method: mtp`, and one without again. Two GPUs have prefill and decode apart, one GPU has a
worker that does both. Prints JSON.

Numbers are medians over the rounds, in ms.

    first_token    from the call on
    second_gap     from the first to the second token: the handoff; on one GPU the head's part of the last chunk
    token          mean time of a token behind the second. Weights are random, so drafts seldom hold: what MTP costs
    less_without   with MTP − the mean of both without
    drift          between both without

The shape is GLM-4.5-Air's with few layers and experts (`cut`), or Qwen3-Next's with few layers. Without GPUs it is a
tiny one on the CPU.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pair import Request, Requests, running_cluster
from tests.benchmarks.results import Numbers, at_most, print_result, rounded

AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_329,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "max_position_embeddings": 131_072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151_552,
}
AIR_CUT, HYBRID = "glm-air-cut", "qwen3-next-8-layers"
CUTS: dict[str, dict[str, str]] = {
    AIR_CUT: {"num_hidden_layers": "12 of 46", "n_routed_experts": "32 of 128"},
    HYBRID: {"num_hidden_layers": "8 of 48"},
}
TINY = {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
LENGTHS, TINY_LENGTHS = (1024, 8192), (64,)
OUTPUT_TOKENS = 48
WARM_UP = 2
REST_SECONDS = 0.2
MORE_MS = 0.5  # at most, of the first token and of the handoff
METHODS = {"without": "none", "with": "mtp", "without again": "none"}
CONFIGS = {"local.yaml": ("split", 0), "gpu-1.yaml": ("colocated", 1), "gpu-1p1d.yaml": ("split", 2)}  # roles, GPUs


def settings(method: str, roles: str, gpus: int) -> dict[str, Any]:
    own = {"speculation.method": method, "cache.prefix_sharing": False, "scheduler.roles": roles}
    return own | ({"model.max_model_len": 16_384} if gpus else {})


def numbers_of(request: Request) -> dict[str, float]:
    """Returns the numbers of one request, in ms."""
    times = request.arrivals
    parts = {
        "first_token": times[0],
        "second_gap": times[1] - times[0],
        "token": (times[-1] - times[1]) / (len(times) - 2),
    }
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def measure(requests: Requests, length: int, rounds: int) -> dict[str, float]:
    """Measures requests with prompts of so many tokens."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + WARM_UP):
        time.sleep(REST_SECONDS)
        requests.request(requests.prompt(length), 2)  # a GPU that has rested is slower than one that has not
        numbers = numbers_of(requests.request(requests.prompt(length), OUTPUT_TOKENS))
        if number >= WARM_UP:
            for name, value in numbers.items():
                found.setdefault(name, []).append(value)
    return {name: Measured.median(values) for name, values in found.items()}


def compared(found: dict[str, dict[str, float]]) -> Numbers:
    """found: of one length, by METHODS."""
    first, second = found["without"], found["without again"]
    less = {name: rounded(value - (first[name] + second[name]) / 2) for name, value in found["with"].items()}
    drift = {name: rounded(abs(value - second[name])) for name, value in first.items()}
    return {**found, "less_without": less, "drift": drift}


def targets_of(results: Numbers) -> list[dict[str, Any]]:
    return [
        at_most(f"{title}: {name} with MTP − without, ms", numbers["less_without"][name], MORE_MS)
        for title, numbers in results.items()
        for name in ("first_token", "second_gap")
    ]


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    usual = list(CONFIGS)[min(torch.cuda.device_count(), 2)]
    parser.add_argument("--config", choices=CONFIGS, default=usual, help=f"of deploy/; here {usual}")
    parser.add_argument("--shape", choices=CUTS, default=AIR_CUT, help="on GPUs")
    add_list(parser, "--lengths", int, default=None, help=f"of prompts; default {LENGTHS}, on a CPU {TINY_LENGTHS}")
    options = parser.parse_args()
    roles, gpus = CONFIGS[options.config]
    lengths = options.lengths or (LENGTHS if gpus else TINY_LENGTHS)
    found: dict[int, dict[str, dict[str, float]]] = {length: {} for length in lengths}
    with tempfile.TemporaryDirectory() as folder:
        shape = COMMON | SHAPES[HYBRID] if options.shape == HYBRID else AIR
        (Path(folder) / "config.json").write_text(json.dumps(shape if gpus else AIR | TINY), encoding="utf-8")
        for name, method in METHODS.items():
            with (
                running_cluster(options.config, Path(folder), settings(method, roles, gpus)) as cluster,
                Requests(cluster.grpc_address) as requests,
            ):
                for length in lengths:
                    found[length][name] = measure(requests, length, options.rounds)
    of_shape = "" if options.shape == AIR_CUT else f" of {options.shape}"
    results: Numbers = {f"prompts of {length}{of_shape}": compared(numbers) for length, numbers in found.items()}
    cut = {"cut": CUTS[options.shape]} if gpus else {}
    print_result({**cut, **results, "targets": targets_of(results) if gpus else []}, options, gpus=gpus)


if __name__ == "__main__":
    main()
