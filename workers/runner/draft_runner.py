"""Drafts by a model: a step of its layers alone for each token."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.models.drafters.drafted_decoder import DraftSteps
from tandem.workers.runner.decode_graphs import DecodeGraphs
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.logits_processor import LogitsProcessor
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch


class DraftRunner:
    """Its steps append to the sequences, and their positions are popped again: the verify step that follows computes
    them in all layers.

    Tokens are drawn with the parameters and numbers of the target's own, so that a drafter with the target's logits
    drafts the target's tokens.
    """

    def __init__(self, steps: DraftSteps, cache: PagedKVCache, processor: LogitsProcessor) -> None:
        self._steps = steps
        self._cache = cache
        self._processor = processor
        self._sampler = EagerSampler(steps.device, processor)
        self._graphs: DecodeGraphs | None = None

    @property
    def num_heads(self) -> int:
        """Of q in the drafter's layers."""
        return self._steps.config.num_heads

    def capture(self, buffers: Sequence[GraphBuffers], capture: Capture) -> None:
        """From now on steps replay CUDA graphs, one for each of `buffers`: see DecodeGraphs."""
        self._graphs = DecodeGraphs(self._steps, self._cache, buffers, (), capture, self._processor)

    def draft(
        self,
        sequence_ids: Sequence[int],
        tokens: Int64Array,
        counts: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> list[Int64Array]:
        """counts[i] ≥ 1 tokens behind tokens[i], the last of sequence i, which is not stored yet; int64 arrays [n].
        Waits for the device.

        positions: of the first drafted tokens. sampling: without LogitRules. No step is in flight.
        """
        order = np.argsort(-counts, kind="stable")
        ids = [sequence_ids[row] for row in order]
        tokens, counts, sampling, positions = tokens[order], counts[order], sampling.take(order), positions[order]
        pending: list[PendingSamples] = []
        grown = np.zeros(order.size, np.int64)
        try:
            for step in range(int(counts[0])):
                rows = np.arange(np.count_nonzero(counts > step))  # those with the longest drafts come first
                own = sampling.take(rows)
                pending.append(self._step(step, ids[: rows.size], tokens[rows], own, positions[rows] + step, grown))
            sampled = [one.wait().token_ids for one in pending]
        finally:
            for sequence, count in zip(ids, grown.tolist(), strict=True):
                self._cache.pop(sequence, count)
        drafts: list[Int64Array] = [np.empty(0, np.int64)] * order.size
        for row, place in enumerate(order.tolist()):
            drafts[place] = np.array([tokens[row] for tokens in sampled[: counts[row]]], np.int64)
        return drafts

    @torch.inference_mode()
    def _step(
        self,
        step: int,
        ids: Sequence[int],
        tokens: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
        grown: Int64Array,
    ) -> PendingSamples:
        """The step of this number. tokens: of the first one. Counts in grown[i] what sequence i has grown by."""
        count = len(ids)
        if self._graphs is not None and count <= self._graphs.largest:
            sources = np.arange(count) if step else np.full(count, ON_HOST)
            grown[:count] += 1
            return self._graphs.step(ids, tokens, sources, sampling, positions, scratch=step)
        forward = self._cache.begin(Batch(ids, push=False, scratch=step))
        grown[:count] += 1
        logits = self._steps.forward(self._inputs(step, tokens), forward.attention, None)
        self._cache.commit(forward, self._steps.layers)
        return self._sampler.sample(logits, sampling, positions)

    def _inputs(self, step: int, tokens: Int64Array) -> Tensor:
        """What the step before has sampled; of the first one `tokens`."""
        if step:
            return self._sampler.sampled[: tokens.size].clone()
        return upload([tokens], self._steps.device)[0]
