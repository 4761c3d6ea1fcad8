"""Forwards of prompts, some of them in graphs, by two runners: one captures, the other does not."""

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.cache.plan.shard import Shard
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.ranks.ranks import ALONE, Ranks
from tandem.workers.runner.batch_buckets import MOST_PROMPTS
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tests.support.oracle import random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.whole_prompts import compute_prompts

LONGEST, PAGE, NUM_PAGES = 256, 8, 200
CAPTURED = 128  # tokens
# Of each forward the tokens that sequences get; NUM_PLAIN of them are in no graph.
FORWARDS: list[dict[int, int]] = [
    {0: 20},
    {1: 30, 2: 4, 3: 1},
    {3: 40, 1: 27, 2: 61},
    {3: 100, 4: 60},  # too many tokens for a graph
    {sequence: 5 for sequence in range(4, 4 + MOST_PROMPTS)},
    {sequence: 1 for sequence in range(4, 5 + MOST_PROMPTS)},  # too many sequences
    {sequence: 3 for sequence in reversed(range(5, 5 + MOST_PROMPTS))},
    {20: 100, 19: 28},
]
NUM_PLAIN = 2
WHOLE = {sequence: sum(forward.get(sequence, 0) for forward in FORWARDS) for sequence in range(5 + MOST_PROMPTS)}


class PromptRunner:
    """One model and cache; replays counts the forwards that a graph computed."""

    def __init__(
        self,
        folder: Path,
        capture: Capture | None,
        kernels: KernelFactory,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        scales: KVScales | None = None,
        snapshots: SnapshotRule = NO_SNAPSHOTS,
        ranks: Ranks = ALONE,
        longest: int = LONGEST,
    ) -> None:
        """capture: None: all forwards are plain. ranks: the ranks of which this is one. longest: of a sequence."""
        config = shard_config(load_config(folder, dtype), Shard(ranks.rank, ranks.size))
        layout = kv_layout(config, PAGE, scales)
        groups = range(len(layout.groups))
        self.pools = [
            torch.full((NUM_PAGES, *layout.page_shape(group)), torch.nan, device=device).to(layout.stored_dtype)
            for group in groups
        ]
        self.cache: TvmCache = TvmCache.of(
            make_cache(
                config,
                layout,
                self.pools,
                max_sequences=24,
                max_length=longest,
                kernels=kernels,
                snapshots=snapshots,
            )
        )
        decoder = load_decoder(folder, config, device=torch.device(device), ranks=ranks)
        self.runner = ModelRunner(decoder, self.cache)
        self.replays = 0
        if capture is not None:
            self.runner.capture_prompts(CAPTURED, self.counting(capture))

    def counting(self, capture: Capture) -> Capture:
        """Wraps a capture so that its replays count in `replays`."""

        def counted(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
            inner = capture(compute)

            def replay() -> Tensor:
                self.replays += 1
                return inner()

            return replay

        return counted

    def forward(self, chunks: dict[int, list[int]], whole: dict[int, int]) -> Tensor:
        tokens = [np.array(chunk) for chunk in chunks.values()]
        return compute_prompts(self.runner, list(chunks), tokens, [whole[one] for one in chunks], push=False)

    def run_all(self) -> Tensor:
        """Runs FORWARDS. Returns the logits of all prompts, in the order in which they end."""
        prompts = {sequence: random_prompt(length, sequence) for sequence, length in WHOLE.items()}
        made, done = [], dict.fromkeys(WHOLE, 0)
        for sequence in WHOLE:
            self.cache.add_sequence(sequence)
        for forward in FORWARDS:
            chunks = {one: prompts[one][done[one] : done[one] + count] for one, count in forward.items()}
            made.append(self.forward(chunks, WHOLE))
            done.update({one: done[one] + count for one, count in forward.items()})
            assert made[-1].shape[0] == sum(done[one] == WHOLE[one] for one in forward)
        assert done == WHOLE
        return torch.cat(made)


class RunInOnePlace:
    """A Capture like GraphCapture, for machines without a GPU: the results of all graphs are in one memory, and a
    replay overwrites the previous result."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        made = compute()
        if not made.is_floating_point():
            return compute  # drafted tokens, which are in memory of their own
        if made.numel() > self._memory.numel():
            self._memory = made.new_empty(made.numel())

        def replay() -> Tensor:
            made = compute()
            place = self._memory.fill_(torch.nan)[: made.numel()]
            return place.view(made.shape).copy_(made)

        return replay


def assert_same_kv(ours: PromptRunner, theirs: PromptRunner, tolerance: float, mostly: float = 1.0) -> None:
    """Compares K and V of all sequences, of at least that share of a sequence's tokens; nobody has written anywhere
    else. If the share is not 1, one token of a short sequence may differ, too."""
    for sequence in range(len(WHOLE)):
        if sequence not in theirs.cache._table:
            continue  # not in every program
        begin, end = theirs.cache.first_position(sequence), theirs.cache.num_tokens(sequence)
        layers = (one.cache.gather_kv(sequence, begin, end) for one in (ours, theirs))
        for mine, other in zip(*(chain.from_iterable(pairs) for pairs in layers), strict=True):
            alike = torch.isclose(mine, other, rtol=tolerance, atol=tolerance).flatten(1).all(1)
            others = (~alike).nonzero().flatten()
            most = math.ceil((1 - mostly) * alike.shape[0])
            assert others.shape[0] <= most, f"sequence {sequence}: unlike at {others}"
    for mine, other in zip(ours.pools, theirs.pools, strict=True):
        assert torch.equal(mine.float().isnan(), other.float().isnan())
