"""A checkpoint's model over a paged cache, without a worker around it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.tvm_cache import TvmCache


class CachedModel:
    """step() feeds some tokens of some sequences, which the cache must have."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu", snapshots: SnapshotRule = NO_SNAPSHOTS) -> None:
        config = load_config(folder, dtype)
        layout = kv_layout(config, 16)
        pools = [
            torch.full((64, *layout.page_shape(group)), torch.nan, dtype=layout.stored_dtype_of(group), device=device)
            for group in range(len(layout.groups))
        ]
        self.cache = TvmCache.of(
            make_cache(config, layout, pools, max_sequences=8, max_length=256, snapshots=snapshots)
        )
        self.runner = ModelRunner(load_decoder(folder, config, device=torch.device(device)), self.cache)

    def step(
        self,
        tokens: dict[int, list[int]],
        *,
        all_rows: bool = False,
        parents: Sequence[Sequence[int] | None] | None = None,
    ) -> Tensor:
        """Returns the logits after the last token of each sequence, or after all tokens. parents:
        token_tree_parents."""
        lengths = [len(part) for part in tokens.values()]
        plan = self.cache.begin_forward(list(tokens), lengths, token_tree_parents=parents)
        packed = np.array([token for part in tokens.values() for token in part], np.int64)
        logits = self.runner.forward(packed, plan, None if all_rows else np.cumsum(lengths) - 1)
        self.cache.end_forward(plan)
        return logits

    def sample(self, logits: Tensor) -> list[int]:
        rows = logits.shape[0]
        batch = SampleBatch.from_params([SamplingParams(temperature=0)] * rows)
        return self.runner.sample(logits, batch, np.zeros(rows, np.int64)).token_ids.tolist()

    def feed(self, sequence: int, text: list[int], splits: Sequence[int]) -> Tensor:
        """Returns the logits after the last token of `text`, which comes in chunks that end at `splits` and at its
        end."""
        edges = [self.cache.num_tokens(sequence), *splits, len(text)]
        return [self.step({sequence: text[begin:end]}) for begin, end in pairwise(edges)][-1]

    def generate(self, sequence: int, logits: Tensor, count: int) -> list[int]:
        """Generates greedy tokens from logits after the sequence's last token."""
        tokens = self.sample(logits)
        while len(tokens) < count:
            tokens += self.sample(self.step({sequence: tokens[-1:]}))
        return tokens
