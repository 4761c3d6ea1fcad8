"""Forwards of short prompts as CUDA graphs, one for each number of tokens of a few: their launches would take the host
longer than they take the device."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tandem.cache.attention.fixed_prompts import FixedPrompts
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.runner.batch_buckets import bucket_of
from tandem.workers.runner.graph_capture import Capture, Replay


class PromptGraphs:
    """A forward runs in the least graph that holds its tokens, filled up with padding."""

    def __init__(
        self, model: DenseDecoder, cache: PagedKVCache, prompts: Sequence[FixedPrompts], capture: Capture
    ) -> None:
        """prompts: PagedKVCache.fixed_prompts, at least one, in ascending order; captures a graph for each."""
        self._model = model
        self._cache = cache
        self._prompts = prompts
        self._sizes = [one.size for one in prompts]
        self._replays: dict[FixedPrompts, Replay] = {}
        for one in reversed(prompts):  # the smaller ones fit into the larger's memory
            one.clear()
            self._replays[one] = capture(partial(self._compute, one))

    def takes(self, num_sequences: int, num_tokens: int) -> bool:
        return num_sequences <= self._prompts[0].num_sequences and num_tokens <= self._sizes[-1]

    @torch.inference_mode()
    def forward(
        self, sequence_ids: Sequence[int], appends: Int64Array, token_ids: Int64Array, last_rows: Int64Array
    ) -> Tensor:
        """Logits [n, vocab] that follow rows last_rows (int64 [n]) of token_ids (int64 [T]), the next appends (int64
        [B]) tokens of each sequence; takes() them."""
        prompts = self._prompts[bucket_of(self._sizes, token_ids.size)]
        self._cache.begin_prompts(prompts, sequence_ids, appends, token_ids, last_rows)
        return self._replays[prompts]()[: last_rows.size].clone()  # the next replay has the same memory

    def _compute(self, prompts: FixedPrompts) -> Tensor:
        return self._model.forward(prompts.token_ids, prompts.attention(), prompts.last_rows)
