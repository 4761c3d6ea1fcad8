"""Drafts by a model after a verify step that is not read yet: all its steps in one graph."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import FOLLOWS, EnteringRows
from tandem.workers.kernels.choice import choose_sampler
from tandem.workers.models.drafters.drafted_decoder import DraftSteps
from tandem.workers.models.drafters.head import HeadSteps
from tandem.workers.runner.forward_graphs import Capture, ForwardGraphs
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.runner.step_inputs import NUM_INPUTS, pack_inputs, unpack_inputs
from tandem.workers.sampling.pending_samples import CopiedSamples, PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch

NUM_CHAIN_INPUTS = NUM_INPUTS + 1


class ChainRows(NamedTuple):
    """The n sequences that a chain drafts for. Arrays are int64 [n]."""

    ids: Sequence[int]
    counts: Int64Array  # tokens to draft, at least 1
    places: Int64Array  # of each among the sequences of the verify step before
    last_rows: Int64Array  # of each in that verify step
    sampling: SampleBatch


class DraftChain:
    """A CUDA graph for each number of drafted tokens and for a few batch sizes, with a step for each token.

    The host plans the last step alone, as if all drafts of the verify step before were accepted. The device moves all
    rows back by the rejected drafts, then on by a position a step.

    A sequence with fewer drafts than others goes on in its last place. Its drafts there are not used.
    """

    def __init__(
        self,
        steps: DraftSteps | HeadSteps,
        cache: PagedKVCache,
        next_drafts: NextDrafts,
        buffers: Sequence[GraphBuffers],
        outputs: Tensor | None,
        most: int,
        capture: Capture,
    ) -> None:
        """buffers: PagedKVCache.graph_buffers of chains with NUM_CHAIN_INPUTS, in ascending order. outputs: of a head,
        what it gives in verify steps; then the first token is drafted from these, with no step. most: tokens of a
        draft."""
        self._steps = steps
        self._cache = cache
        self._next_drafts = next_drafts
        self._outputs = outputs
        self._ahead = 0 if outputs is None else 1
        size, device = buffers[-1].size, steps.device
        self._sampler = choose_sampler(size, device)
        self._drafted = torch.zeros((most, size), dtype=torch.int64, device=device)
        self._words = torch.zeros((2, size), dtype=torch.int64, device=device)  # nothing is posted there
        self._graphs = {
            count: ForwardGraphs(buffers, capture, partial(self._compute, count)) for count in range(most, 0, -1)
        }

    def takes(self, counts: Int64Array) -> bool:
        """Whether drafts of so many tokens, of a sequence each, can be launched."""
        return counts.size <= self._graphs[1].largest and counts.max() <= len(self._graphs)

    @torch.inference_mode()
    def launch(self, rows: ChainRows) -> PendingSamples:
        """Drafts for these sequences, each up to the longest; see Drafts.draft_behind."""
        longest, planned = int(rows.counts.max()), np.maximum(rows.counts - self._ahead, 1)
        inputs = pack_inputs(rows.last_rows, FOLLOWS - rows.places, 0, rows.sampling, None)
        graphs = self._graphs[longest]
        buffers = graphs.choose(planned.size)
        forward = self._cache.begin(Batch(rows.ids, planned, push=False), buffers, [*inputs, planned - 1])
        try:
            graphs.replay(buffers)
            self._cache.commit(forward, self._steps.layers)
        finally:
            self._cache.pop_each(rows.ids, planned)  # the verify step that follows stores there
        return CopiedSamples(self._drafted[:longest, : planned.size].flatten(), None)

    def _compute(self, count: int, buffers: GraphBuffers) -> Tensor:
        buffers.fetch()
        last_rows, sources, tickets, sampling = unpack_inputs(buffers.inputs[:NUM_INPUTS])
        steps = buffers.inputs[-1]
        rows = EnteringRows(sources, buffers.positions - steps, sampling.uniforms.view(torch.int64), steps)
        drafted = self._drafted[:, : buffers.size]
        for number in range(count):
            entered = self._next_drafts.enter(rows, number, self._ahead)
            if number < self._ahead:
                logits = self._ahead_of_all(last_rows - entered.shift)
            else:
                attention = buffers.attention(shift=lambda shift=entered.shift: shift, fetched=True)
                logits = self._steps.forward(entered.tokens, attention, None)
            sampling = sampling._replace(uniforms=entered.uniforms.view(torch.float64))
            self._sampler.sample(logits, sampling, drafted[number], tickets, self._words)
            self._next_drafts.put(sources, number, drafted[number])
        return drafted

    def _ahead_of_all(self, rows: Tensor) -> Tensor:
        """Logits of the first drafts, after these rows, int64 [n], of what the head gave in the verify step."""
        assert self._steps.ahead == 1, "a head drafts"
        assert self._outputs is not None
        self._steps.go_on_from(self._outputs, rows)
        return self._steps.logits_ahead(rows.shape[0])
