"""vLLM's steps with drafts, for comparison with verify_steps: the same shape, prompts and model; prints JSON.

Run where vLLM can be imported; nothing of tandem is. An engine process for each method, one behind the other. EAGLE-3's
head has random weights: none of its drafts holds, or vLLM's synthetic acceptance says that they do.

with p      tokens a second ÷ those of plain decoding, where a drafted token holds with probability p. The second of
            two batches, from when each row has a token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.counting_prompts import (
    FIRST_TOKEN,
    MOST_DRAFTED,
    OUTPUT,
    SCALE,
    TOKENS_A_ROW,
    check_counts,
    prompts_of,
)
from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.model_shapes import write_eagle3, write_shape
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import noted, print_result, print_skipped

NONE, EAGLE3 = "none", "eagle3"
METHODS = (NONE, "ngram_gpu", "ngram", EAGLE3)
ROWS = (1, 8, 32)
HOLDS = (0.0, 0.5, 0.7, 0.9)
SYNTHETIC = (0.0, 0.7)  # of EAGLE-3; each needs an engine
MODEL = "qwen3-8b"
ENGINE_SECONDS = 200.0


def count_up(model: Any) -> None:
    """Makes a model with random weights say t + 1 behind token t."""
    model.model.norm.weight.data.fill_(1)
    model.model.embed_tokens.weight.data.copy_(model.lm_head.weight.data.roll(-1, 0).float() * SCALE)


def engine_of(method: str, holds: float, rows: int, folder: Path) -> Any:
    drafts: dict[str, Any] | None = {"method": method, "num_speculative_tokens": MOST_DRAFTED}
    if method == NONE:
        drafts = None
    elif method == EAGLE3:
        drafts["model"] = str(write_eagle3(MODEL, folder))
        if holds:
            rates = [holds**number for number in range(1, MOST_DRAFTED + 1)]
            drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    else:
        drafts |= {"prompt_lookup_max": 1, "prompt_lookup_min": 1}
    engine = import_module("vllm").LLM(
        model=str(write_shape(MODEL, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=rows,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=drafts,
    )
    engine.apply_model(count_up)
    return engine.llm_engine


def generate(engine: Any, rows: int, holds: float, *, counts: bool) -> dict[str, Any]:
    """counts: whether the model counts up, for drafts hold only where they are right."""
    prompts = prompts_of(rows, holds, MOST_DRAFTED)
    params = import_module("vllm").SamplingParams(
        temperature=0, max_tokens=prompts[0].size // 4, ignore_eos=True, detokenize=False
    )
    for row, prompt in enumerate(prompts):
        before = FIRST_TOKEN + row * TOKENS_A_ROW - 1  # the first token
        engine.add_request(str(row), {"prompt_token_ids": [*prompt.tolist(), before]}, params)
    seen, times, sizes = [0] * rows, [], []
    tokens: list[list[int]] = [[] for _ in range(rows)]
    while engine.has_unfinished_requests():
        for output in engine.step():
            row = int(output.request_id)
            tokens[row] = list(output.outputs[0].token_ids)
            seen[row] = len(tokens[row])
        if all(seen):
            times.append(time.perf_counter())
            sizes.append(sum(seen))
        if sizes and sizes[-1] - sizes[0] >= rows * OUTPUT:
            break
    engine.abort_request([str(row) for row in range(rows)])
    while engine.has_unfinished_requests():
        engine.step()
    if counts:
        for row_tokens in tokens:
            check_counts(row_tokens)
    new, seconds, steps = sizes[-1] - sizes[0], times[-1] - times[0], len(times) - 1
    gaps = [after - before for before, after in pairwise(times[1:])]
    return {
        "tokens_per_s": rounded(new / seconds),
        "tokens a step": rounded(new / rows / steps),
        "ms of a step": Measured.median(gaps, 1e3),
    }


def measure(method: str, synthetic: float, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one engine in this process."""
    result: dict[str, Any] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(method, synthetic, max(options.rows), Path(folder))
    result["start_s"] = rounded(time.perf_counter() - began)
    for rows in options.rows:
        for holds in options.holds if method.startswith("ngram") else (synthetic,):
            numbers = [generate(engine, rows, holds, counts=not synthetic) for _ in range(2)][1]
            result |= {f"rows {rows}.with {holds}, {name}": value for name, value in numbers.items()}
    return result


def engine_process(method: str, synthetic: float, options: argparse.Namespace) -> dict[str, Any]:
    """measure() in a process of its own, which leaves the GPU empty."""
    lists = [f"--{name}={','.join(map(str, getattr(options, name)))}" for name in ("rows", "holds")]
    command = [sys.executable, "-m", __spec__.name, *lists, f"--methods={method}", f"--synthetic={synthetic}", "--one"]
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=ENGINE_SECONDS, check=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def with_ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Beside each tokens_per_s its part of plain decoding's."""
    plain = result.get(NONE, {})
    for numbers in result.values():
        for name in [name for name in numbers if name.endswith("tokens_per_s")]:
            without = plain.get(f"{name.split('.')[0]}.with 0.0, tokens_per_s")
            if without:
                numbers[name.replace("tokens_per_s", "to_plain")] = rounded(numbers[name] / without)
    return result


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--methods", str, default=METHODS, choices=METHODS, help="vLLM's names")
    add_list(parser, "--rows", int, default=ROWS, help="sequences of a step")
    add_list(parser, "--holds", float, default=HOLDS, help="probability of a drafted token to be the target's")
    add_list(parser, "--synthetic", float, default=SYNTHETIC, help="the same, of EAGLE-3")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    add_seconds(parser)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.one:
        print("\n" + json.dumps(measure(options.methods[0], options.synthetic[0], options)))
        return
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        print_skipped("needs vLLM")
        return
    budget = Budget(options.seconds)
    result: dict[str, Any] = {}
    cases = [(method, p) for method in options.methods for p in (options.synthetic if method == EAGLE3 else (0.0,))]
    for method, synthetic in budget.within(cases):
        title = f"{method}, {synthetic} synthetic" if synthetic else method
        noted(result, title, partial(engine_process, method, synthetic, options))
    print_result({"vllm": version} | with_ratios(result), options, gpus=1)


if __name__ == "__main__":
    main()
