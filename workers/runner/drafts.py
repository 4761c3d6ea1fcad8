"""Drafts by a model, or by a head of the target: a step of its layers alone for each token."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.models.drafters.drafted_decoder import DraftSteps
from tandem.workers.models.drafters.head import HeadSteps
from tandem.workers.runner.decode_graphs import DecodeGraphs
from tandem.workers.runner.draft_chain import ChainRows, DraftChain
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.logits_processor import LogitsProcessor
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.sample_batch import SampleBatch


class DraftStep(NamedTuple):
    """One of the steps that make drafts, of n sequences."""

    number: int  # the first is 0
    ids: Sequence[int]
    tokens: Int64Array  # [n], before the draft
    sampling: SampleBatch
    positions: Int64Array  # [n], of the tokens that the step drafts


class Drafts:
    """Drafts by a model of its own, with a step of its layers for each token.

    Its steps append to the sequences, and their positions are popped again: the verify step that follows computes
    them in all layers.

    Tokens are drawn with the parameters and numbers of the target's own, so that a drafter with the target's logits
    drafts the target's tokens.
    """

    def __init__(self, steps: DraftSteps | HeadSteps, cache: PagedKVCache, processor: LogitsProcessor) -> None:
        self._cache = cache
        self._steps = steps
        self._processor = processor
        self._sampler = EagerSampler(steps.device, processor)
        self._graphs: DecodeGraphs | None = None
        self._chain: DraftChain | None = None
        self.ahead = steps.ahead

    def note(self, noted: "Noted | None") -> None:
        """Notes the target's last step; None: the step has no outputs of a head."""

    def capture(self, buffers: Sequence[GraphBuffers], capture: Capture) -> None:
        """Makes steps replay CUDA graphs from now on, one for each of `buffers`: see DecodeGraphs."""
        self._graphs = DecodeGraphs(self._steps, self._cache, buffers, (), capture, self._processor)

    def capture_chains(
        self,
        next_drafts: NextDrafts,
        buffers: Sequence[GraphBuffers],
        outputs: Tensor | None,
        most: int,
        capture: Capture,
    ) -> None:
        """Makes draft_behind() launch from now on: see DraftChain. outputs: where verify steps have what a head
        gives."""
        self._chain = DraftChain(self._steps, self._cache, next_drafts, buffers, outputs, most, capture)

    def draft_behind(
        self, sequence_ids: Sequence[int], counts: Int64Array, sampling: SampleBatch
    ) -> PendingSamples | None:
        """Launches drafts of counts[i] ≥ 0 tokens, int64 [n], not all 0, for each sequence of the verify step that was
        launched last, in a graph. The verify step that follows takes them on the device.

        Returns tokens [longest · m] of the m sequences with a draft, in order, one step of the chain after another.
        None: nothing is launched.
        """
        (places,) = counts.nonzero()
        rows, counts = self._last_rows(counts.size), counts[places]
        if rows is None or self._chain is None or not self._chain.takes(counts):
            return None
        ids = [sequence_ids[place] for place in places.tolist()]
        return self._chain.launch(ChainRows(ids, counts, places, rows[places], sampling.take(places)))

    def _last_rows(self, count: int) -> Int64Array | None:
        """int64 [n], of the sequences of the last verify step, where a chain goes on from; None: they are not there."""
        return np.zeros(count, np.int64)

    def moved_back(self, surplus: Mapping[int, int]) -> None:
        """The sequences, by their ids, stood so many positions earlier in the last step than was planned."""

    @property
    def num_heads(self) -> int:
        """The number of q heads in the layers of a step."""
        return self._steps.config.num_heads

    def draft(
        self,
        sequence_ids: Sequence[int],
        tokens: Int64Array,
        counts: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> list[Int64Array]:
        """counts[i] ≥ 1 tokens after tokens[i], the last of sequence i, which is not stored yet; int64 arrays [n].
        Waits for the device.

        positions: of the first drafted tokens. sampling: without LogitRules. No step is in flight.
        """
        order = np.argsort(-counts, kind="stable")
        ids = [sequence_ids[row] for row in order]
        tokens, counts, sampling, positions = tokens[order], counts[order], sampling.take(order), positions[order]
        pending: list[PendingSamples] = []
        graphs = self._graphs if self._graphs is not None and order.size <= self._graphs.largest else None
        before = self._lengths(ids)
        try:
            for number in range(int(counts[0])):
                rows = np.arange(np.count_nonzero(counts > number))  # those with the longest drafts come first
                own = sampling.take(rows)
                step = DraftStep(number, ids[: rows.size], tokens[rows], own, positions[rows] + number)
                pending.append(self._step(step, graphs))
            sampled = [one.wait().token_ids for one in pending]
        finally:
            self._cache.pop_each(ids, self._lengths(ids) - before)
        drafts: list[Int64Array] = [np.empty(0, np.int64)] * order.size
        for row, place in enumerate(order.tolist()):
            draft = np.array([tokens[row] for tokens in sampled[: counts[row]]], np.int64)
            finite = np.cumprod(draft != NOT_FINITE, dtype=np.int64)
            drafts[place] = draft[: finite.sum()]
        return drafts

    def _lengths(self, sequence_ids: Sequence[int]) -> Int64Array:
        return np.array([self._cache.sequence(one).num_tokens for one in sequence_ids], np.int64)

    @torch.inference_mode()
    def _step(self, step: DraftStep, graphs: DecodeGraphs | None) -> PendingSamples:
        """graphs: of all steps of the draft, None where they are eager."""
        count, number = len(step.ids), step.number - self.ahead
        if graphs is not None:
            sources = np.arange(count) if step.number else np.full(count, ON_HOST)
            rest = step.sampling, step.positions
            return graphs.step(step.ids, step.tokens, sources, *rest, scratch=number, without_states=True)
        forward = self._cache.begin(Batch(step.ids, push=False, scratch=number, without_states=True))
        inputs = self._sampler.sampled[:count].clone() if step.number else upload([step.tokens], self._steps.device)[0]
        logits = self._steps.forward(inputs, forward.attention, None)
        self._cache.commit(forward, self._steps.layers)
        return self._sampler.sample(logits, step.sampling, step.positions)


class HeadDrafts(Drafts):
    """Drafts by a DraftHead. The target's step has computed what the first token follows from; then the head goes on by
    itself."""

    def __init__(self, steps: HeadSteps, cache: PagedKVCache, processor: LogitsProcessor) -> None:
        self._head_steps = steps
        super().__init__(steps, cache, processor)
        self._noted: Noted | None = None

    def capture(self, buffers: Sequence[GraphBuffers], capture: Capture) -> None:
        """See Drafts.capture."""
        self._head_steps.reserve(buffers[-1].size)
        super().capture(buffers, capture)

    def note(self, noted: "Noted | None") -> None:
        """See Drafts.note."""
        self._noted = noted

    def moved_back(self, surplus: Mapping[int, int]) -> None:
        """See Drafts.moved_back."""
        if self._noted is not None:
            earlier = [surplus.get(int(one), 0) for one in self._noted.sequence_ids]
            self._noted = self._noted._replace(positions=self._noted.positions - np.array(earlier))

    def _last_rows(self, count: int) -> Int64Array | None:
        noted = self._noted
        return None if noted is None or noted.appends is None else np.cumsum(noted.appends) - 1

    def draft(
        self,
        sequence_ids: Sequence[int],
        tokens: Int64Array,
        counts: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> list[Int64Array]:
        """See Drafts.draft. Nothing for sequences that the last step did not have."""
        drafts: list[Int64Array] = [np.empty(0, np.int64)] * len(sequence_ids)
        if self._noted is None:
            return drafts
        rows = self._noted.rows(sequence_ids, positions)
        known = np.flatnonzero(rows >= 0)
        if not known.size:
            return drafts
        known = known[np.argsort(-counts[known], kind="stable")]
        self._head_steps.go_on_from(self._noted.outputs, upload([rows[known]], self._steps.device)[0])
        ids = [sequence_ids[row] for row in known]
        found = super().draft(ids, tokens[known], counts[known], sampling.take(known), positions[known])
        for row, draft in zip(known.tolist(), found, strict=True):
            drafts[row] = draft
        return drafts

    @torch.inference_mode()
    def _step(self, step: DraftStep, graphs: DecodeGraphs | None) -> PendingSamples:
        if step.number:
            return super()._step(step, graphs)
        count = len(step.ids)
        pending = self._sampler.sample(self._head_steps.logits_ahead(count), step.sampling, step.positions)
        if graphs is not None:
            graphs.take(self._sampler.sampled[:count])
        return pending


def make_drafts(steps: DraftSteps | HeadSteps | None, cache: PagedKVCache, processor: LogitsProcessor) -> Drafts | None:
    """steps: a model's draft_steps(); None: it has no drafter."""
    if steps is None:
        return None
    return HeadDrafts(steps, cache, processor) if steps.ahead == 1 else Drafts(steps, cache, processor)


class Noted(NamedTuple):
    """The head's outputs in a step of the target, for n sequences: outputs [T or more, H], for rows of one sequence
    after another. positions: int64 [n], of the first token that was sampled for each. appends: int64 [n], rows of each;
    None: one."""

    outputs: Tensor
    sequence_ids: Sequence[int] | Int64Array
    positions: Int64Array
    appends: Int64Array | None = None

    def rows(self, sequence_ids: Sequence[int], positions: Int64Array) -> Int64Array:
        """Returns for each sequence the row after which a token at its position is drafted, -1 where there is none. All
        int64 [m]."""
        appends = np.ones_like(self.positions) if self.appends is None else self.appends
        begins = np.cumsum(appends) - appends
        places = {int(sequence): place for place, sequence in enumerate(self.sequence_ids)}
        rows = np.full(positions.size, -1)
        for index, sequence in enumerate(sequence_ids):
            place = places.get(int(sequence))
            offset = -1 if place is None else int(positions[index] - 1 - self.positions[place])
            if place is not None and 0 <= offset < appends[place]:
                rows[index] = begins[place] + offset
        return rows
