"""Decode steps as CUDA graphs, one for each batch size of a few: a step costs the host one launch, not hundreds."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.fixed_batch import FixedBatch
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.choice import choose_sampler
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.runner.batch_buckets import LEAST_TO_SHARE, bucket_of
from tandem.workers.runner.graph_capture import Capture, Replay
from tandem.workers.runner.step_inputs import ON_HOST, pack_inputs, unpack_inputs
from tandem.workers.sampling.pending_samples import CopiedSamples, PendingSamples
from tandem.workers.sampling.posted_samples import PostBox
from tandem.workers.sampling.random import logprobs_of
from tandem.workers.sampling.sample_batch import NO_LOGPROBS, SampleBatch


class DecodeGraphs:
    """Each step's graph fetches its arrays from the host, takes its input tokens from there or from the step before;
    then embeds, attends, draws tokens and posts them to the host. Nothing stands between two graphs, unless rows report
    log-probabilities.

    So a step can be launched before the host knows what the one before has drawn. A step whose rows share so many pages
    that reading them once for all pays (PagedKVCache.pays_to_share) runs in one of the sharing batches' graphs.
    """

    def __init__(
        self, model: DenseDecoder, cache: PagedKVCache, batches: Sequence[FixedBatch], capture: Capture
    ) -> None:
        """batches: PagedKVCache.fixed_batches with NUM_INPUTS, in ascending order, then those that share, if any, in
        ascending order too; captures a graph for each."""
        self._model = model
        self._cache = cache
        self._batches = [batch for batch in batches if not batch.sharing]
        self._sharing = [batch for batch in batches if batch.sharing]
        self._sizes = [batch.size for batch in self._batches]
        self._sharing_sizes = [batch.size for batch in self._sharing]
        self._sampler = choose_sampler(self._sizes[-1], model.device)
        self._posts = PostBox(self._sizes[-1], model.device)
        self._last = torch.zeros(self._sizes[-1], dtype=torch.int64, device=model.device)  # what the last step drew
        self._foreseen: FixedBatch | None = None
        self._replays: dict[FixedBatch, Replay] = {}
        for batch in sorted(batches, key=lambda batch: -batch.size):  # the smaller ones fit into the larger's memory
            batch.clear()
            self._replays[batch] = capture(partial(self._compute, batch))

    def foresee(self, sequence_ids: tuple[int, ...], sampling: SampleBatch, positions: Int64Array) -> None:
        """See ModelRunner.foresee."""
        batch, tokens = self._choose(sequence_ids), np.zeros_like(positions)
        filled = self._cache.foresee(batch, sequence_ids, pack_inputs(tokens, tokens, 0, sampling, positions))
        self._foreseen = batch if filled and (sampling.num_logprobs == NO_LOGPROBS).all() else None

    @torch.inference_mode()
    def step_foreseen(self, sequence_ids: tuple[int, ...], tokens: Int64Array) -> PendingSamples | None:
        """See ModelRunner.step_foreseen."""
        batch, self._foreseen = self._foreseen, None
        if batch is None:
            return None
        ticket = self._posts.next_ticket()
        inputs = [tokens, np.full_like(tokens, ON_HOST), np.full_like(tokens, ticket)]
        logits = self._cache.step_foreseen(batch, sequence_ids, inputs, self._replays[batch])
        return None if logits is None else self._posts.expect(ticket, tokens.size)

    @torch.inference_mode()
    def step(
        self,
        sequence_ids: Sequence[int] | Int64Array,
        tokens: Int64Array,
        sources: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> PendingSamples:
        """Launches one step; see ModelRunner.step."""
        rows = len(sequence_ids)
        self._foreseen = None  # its batch is filled with something else
        batch = self._choose(sequence_ids)
        ticket = self._posts.next_ticket()
        self._cache.begin_fixed(batch, sequence_ids, pack_inputs(tokens, sources, ticket, sampling, positions))
        logits = self._replays[batch]()[:rows]
        logprobs = logprobs_of(logits, self._last[:rows], sampling.num_logprobs)
        return self._posts.expect(ticket, rows) if logprobs is None else CopiedSamples(self._last[:rows], logprobs)

    def _choose(self, sequence_ids: Sequence[int] | Int64Array) -> FixedBatch:
        rows = len(sequence_ids)
        if self._sharing and LEAST_TO_SHARE <= rows <= self._sharing_sizes[-1]:
            batch = self._sharing[bucket_of(self._sharing_sizes, rows)]
            if self._cache.pays_to_share(batch, sequence_ids):
                return batch
        return self._batches[bucket_of(self._sizes, rows)]

    def _compute(self, batch: FixedBatch) -> Tensor:
        attention = batch.attention()
        tokens, sources, tickets, draws = unpack_inputs(batch.inputs)
        inputs = self._sampler.inputs(tokens, sources, self._last)
        logits = self._model.forward(inputs, attention, None)
        self._sampler.sample(logits, draws, self._last[: batch.size], tickets, self._posts.words)
        return logits
