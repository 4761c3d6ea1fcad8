"""Token trees on a GPU: 64 nodes × 32 sequences at context 4K, in Qwen3-8B's heads, against as many plain tokens.

Both go through the cache's kernels of one layer; append and attention are timed together. The chain is what verifies
one guess of 64 tokens a sequence. Prints JSON.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan import TokenLayout, lay_out_tokens, look_up_pages
from tandem.cache.rope import RopeParameters, RotaryEmbedding
from tandem.cache.token_tree import lay_out_trees
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS, LAYER = 32, 8, 128, 16, 4, 1
DTYPE = torch.bfloat16
BATCH, CONTEXT, NODES = 32, 4096, 64
BRANCHING = {"binary": 2, "of 8 branches": 8, "chain": 1}
PLANS = 50


def seconds(run: Callable[[], object]) -> float:
    """Median on the device, caches flushed before each run."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(run, warmup=50, rep=400, return_mode="median")
    return milliseconds / 1e3


class Case:
    """All sequences append NODES tokens behind CONTEXT positions on shuffled pages, plain ones or nodes of trees."""

    def __init__(self, pool: Tensor, parents: Sequence[np.ndarray] | None) -> None:
        pages_each = pool.shape[0] // BATCH
        table = np.random.default_rng(0).permutation(pool.shape[0]).astype(np.int32).reshape(BATCH, pages_each)
        plain = lay_out_tokens(np.full(BATCH, CONTEXT), np.full(BATCH, NODES))
        self.parents = parents
        self.tokens = plain if parents is None else with_trees(plain, parents)
        self.tables = look_up_pages(table, np.arange(BATCH), self.tokens, PAGE_SIZE)
        self.kernels = choose_kernels(pool, Scoring(HEAD_DIM**-0.5))
        self.plan = self.kernels.plan(self.tokens, self.tables)
        rows = torch.randn(BATCH * NODES, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.q, self.k, self.v = rows.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
        rotary = RotaryEmbedding(RopeParameters("default", HEAD_DIM), CONTEXT + NODES, "cuda", DTYPE)
        self.rotation = rotary.rotation(torch.from_numpy(self.tokens.rope_positions))

    def layer(self) -> Tensor:
        q, k = self.kernels.append(LAYER, self.q, self.k, self.v, self.rotation, self.plan)
        return self.kernels.attend(LAYER, q, k, self.v, self.plan)

    def plan_seconds(self) -> float:
        """On the host, trees and kernels; FlashInfer's own planning, which the first layer does, is not in it."""
        begin = time.perf_counter()
        for _ in range(PLANS):
            tokens = self.tokens if self.parents is None else with_trees(self.tokens, self.parents)
            self.kernels.plan(tokens, self.tables)
        return (time.perf_counter() - begin) / PLANS


def with_trees(tokens: TokenLayout, parents: Sequence[np.ndarray]) -> TokenLayout:
    return replace(tokens, trees=lay_out_trees(np.arange(len(parents)), list(parents), tokens.qo_indptr))


def draw_trees(branching: int) -> list[np.ndarray]:
    """Each node hangs on one of the last `branching` before it."""
    random = Random(branching)
    return [
        np.array([random.randint(max(-1, node - branching), node - 1) for node in range(NODES)]) for _ in range(BATCH)
    ]


def main() -> None:
    if not torch.cuda.is_available():
        print_skipped("needs a CUDA device")
        return
    num_pages = BATCH * -(-(CONTEXT + NODES) // PAGE_SIZE)
    with torch.inference_mode():
        pool = torch.randn((num_pages, LAYERS, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype=DTYPE, device="cuda")
        chain = Case(pool, None)
        trees = {name: Case(pool, draw_trees(branching)) for name, branching in BRANCHING.items()}
        plain = seconds(chain.layer)
        measured = {name: seconds(case.layer) for name, case in trees.items()}
        again = seconds(chain.layer)
    print_result(
        {
            "device": torch.cuda.get_device_name(),
            "chain_us": rounded(plain * 1e6),
            "chain_again_us": rounded(again * 1e6),
            "tree_us": {name: rounded(value * 1e6) for name, value in measured.items()},
            "plan_us": {
                "plain": rounded(chain.plan_seconds() * 1e6),
                **{name: rounded(case.plan_seconds() * 1e6) for name, case in trees.items()},
            },
            "targets": [
                at_most(f"tree {name} ÷ chain", value / min(plain, again), 1.3) for name, value in measured.items()
            ],
        }
    )


if __name__ == "__main__":
    main()
