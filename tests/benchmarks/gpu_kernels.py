"""The cache's GPU kernels in Qwen3-8B's shapes, against roofs measured in the same run; prints JSON.

append: bytes it must move / time ÷ C, a device copy (read and written bytes / time). attention: the time of bare
FlashInfer on a pool of one layer ÷ ours on a layer of a page-major pool; prefill of one prompt, decode of a batch.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.rope import RopeParameters, RotaryEmbedding
from tandem.cache.plan.tables import lay_out_tokens, look_up_pages
from tests.benchmarks.device_time import device_seconds, measure_copy
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, print_result, print_skipped, rounded

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 32, 8, 128, 16, 4
DTYPE = torch.bfloat16
PROMPT = 8192
ROWS, CONTEXT = 64, 4096
PARTS = ("prefill", "decode")


class Case:
    """Sequences with `cached` positions each that append `new` ones each, on shuffled pages."""

    def __init__(self, sequences: int, cached: int, new: int) -> None:
        pages_each = -(-(cached + new) // PAGE_SIZE)
        generator = np.random.default_rng(0)
        table = generator.permutation(sequences * pages_each).astype(np.int32).reshape(sequences, -1)
        self.tokens = lay_out_tokens(np.full(sequences, cached), np.full(sequences, new))
        self.tables = look_up_pages(table, np.arange(sequences), self.tokens, PAGE_SIZE)
        self.pool = torch.randn((table.size, LAYERS, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype=DTYPE, device="cuda")
        self.kernels = choose_kernels(self.pool, Scoring(HEAD_DIM**-0.5))
        self.plan = self.kernels.plan(self.tokens, self.tables)
        rows = torch.randn(sequences * new, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.q, self.k, self.v = rows.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
        rotary = RotaryEmbedding(RopeParameters("default", HEAD_DIM), cached + new, "cuda", DTYPE)
        self.rotation = rotary.rotation(torch.from_numpy(self.tokens.positions))

    def append(self) -> tuple[Tensor, Tensor]:
        return self.kernels.append(1, self.q, self.k, self.v, self.rotation, self.plan)

    def append_bytes(self) -> int:
        """q, k and v read; q, K and V written; cos and sin read once."""
        element = self.q.element_size()
        return self.q.shape[0] * HEAD_DIM * element * (2 * Q_HEADS + 4 * KV_HEADS + 2)

    def attend(self, q: Tensor) -> Tensor:
        return self.kernels.attend(1, q, self.k, self.v, self.plan)


def bare_flashinfer(case: Case) -> Callable[[Tensor], Tensor]:
    """The wrapper alone, over layer 1 copied into a pool of its own."""
    import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13

    pool = case.pool[:, 1].contiguous()
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    tables = [
        torch.from_numpy(array)
        for array in (case.tables.kv_indptr, case.tables.kv_indices, case.tables.kv_last_page_len)
    ]
    sizes = (Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    if case.tokens.positions.size == case.tokens.seq_lens.size:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*tables, *sizes, q_data_type=DTYPE)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(torch.from_numpy(case.tokens.qo_indptr), *tables, *sizes, causal=True, q_data_type=DTYPE)
    output = torch.empty(case.q.shape, dtype=DTYPE, device="cuda")
    return lambda q: wrapper.run(q, pool, out=output)


def measure(case: Case, roof: float) -> dict[str, float]:
    q, _ = case.append()
    bare = bare_flashinfer(case)
    append, ours, theirs = (
        device_seconds(case.append),
        device_seconds(lambda: case.attend(q)),
        device_seconds(lambda: bare(q)),
    )
    error = float((case.attend(q).float() - bare(q).float()).abs().max())
    return {
        "append_us": append.scaled(1e6),
        "append_to_copy": rounded(case.append_bytes() / append / roof),
        "attention_us": ours.scaled(1e6),
        "attention_to_bare": rounded(theirs / ours),
        "largest_difference": error,
    }


def measure_prefill(prompt: int, roof: float) -> dict[str, float]:
    found = measure(Case(1, 0, prompt), roof)
    return found | {"tflops": rounded(2 * prompt**2 * Q_HEADS * HEAD_DIM / found["attention_us"] / 1e6)}


def measure_decode(rows: int, context: int, roof: float) -> dict[str, float]:
    found = measure(Case(rows, context - 1, 1), roof)
    kv_bytes = rows * context * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
    return found | {"kv_gb_per_s": rounded(kv_bytes / found["attention_us"] / 1e3)}


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the targets of the measured parts, in the sizes that targets are set for."""
    targets = []
    if (prefill := results.get(f"prefill of {PROMPT}")) is not None:
        targets.append(at_least("append of 8K tokens ÷ device copy", prefill["append_to_copy"], 0.85))
        targets.append(at_least("prefill attention, bare FlashInfer ÷ ours", prefill["attention_to_bare"], 0.97))
    if (decode := results.get(f"decode of {ROWS} at {CONTEXT}")) is not None:
        targets.append(at_least("decode attention, bare FlashInfer ÷ ours", decode["attention_to_bare"], 0.97))
    return targets


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--prompts", int, default=[PROMPT], help="tokens")
    add_list(parser, "--rows", int, default=[ROWS], help="sequences that decode")
    add_list(parser, "--contexts", int, default=[CONTEXT], help="positions of each of them")
    add_list(parser, "--parts", default=PARTS, choices=PARTS)
    add_seconds(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    budget, results = Budget(options.seconds), dict[str, Any]()
    with torch.inference_mode():
        roof = measure_copy()
        for prompt in budget.within(options.prompts if "prefill" in options.parts else ()):
            results[f"prefill of {prompt}"] = measure_prefill(prompt, roof)
        decodes = product(options.rows, options.contexts) if "decode" in options.parts else ()
        for rows, context in budget.within(decodes):
            results[f"decode of {rows} at {context}"] = measure_decode(rows, context, roof)
    device = {"device": torch.cuda.get_device_name(), "copy_gb_per_s": rounded(roof / 1e9)}
    print_result(device | results | {"targets": targets_of(results)}, options, gpus=1)


if __name__ == "__main__":
    main()
