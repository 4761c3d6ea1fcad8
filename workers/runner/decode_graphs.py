"""Decode steps as CUDA graphs, one for each batch size of a few: a step costs the host one launch, not hundreds."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.adapters.adapted_rows import AdaptedRows
from tandem.workers.kernels.choice import choose_sampler
from tandem.workers.models.decoder import Decoder
from tandem.workers.runner.batch_buckets import MIXED_ROWS, MIXED_TOKENS
from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.runner.logits_processor import LogitsProcessor
from tandem.workers.runner.mixed_attention import MixedAttention
from tandem.workers.runner.mixed_graphs import MixedGraphs
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.runner.step_graphs import StepGraphs
from tandem.workers.runner.step_inputs import (
    NUM_INPUTS,
    ON_HOST,
    StepInputs,
    pack_inputs,
    pack_sampling,
    unpack_inputs,
    unpack_sampling,
)
from tandem.workers.sampling.pending_samples import CopiedSamples, LateSamples, PendingSamples
from tandem.workers.sampling.posted_samples import PostBox
from tandem.workers.sampling.sample_batch import NO_LOGPROBS, SampleBatch
from tandem.workers.sampling.token_logprobs import logprobs_of


class DecodeGraphs:
    """Each step's graph fetches its arrays from the host, takes its input tokens from there or from the step before;
    then embeds, attends, samples tokens and posts them to the host. Nothing stands between two graphs, unless rows
    report log-probabilities or have LogitRules.

    So a step can be launched before the host knows what the one before has sampled. A step whose rows share so many
    pages that reading them once for all pays (GraphBuffers.pays_to_share) runs in the graph of buffers for sharing.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        plain: Sequence[GraphBuffers],
        sharing: Sequence[GraphBuffers],
        capture: Capture,
        processor: LogitsProcessor,
        sliding: Sequence[GraphBuffers] = (),
        next_drafts: NextDrafts | None = None,
        target: Decoder | None = None,
        adapted: AdaptedRows | None = None,
    ) -> None:
        """plain, sharing, sliding: PagedKVCache.graph_buffers of steps with NUM_INPUTS, in ascending order. Captures a
        graph for each. next_drafts: of verify steps that may follow one another. target: of a model that drafts, too,
        for steps without the drafter; those have graphs of their own. adapted: of rows with adapters, for which there
        are graphs of their own, too; buffers then have so many inputs more."""
        self._model = model
        self._cache = cache
        self._processor = processor
        self._next_drafts = next_drafts
        self._adapted = adapted = adapted or AdaptedRows(None, model.device)
        largest = plain[-1].size
        self._sampler = choose_sampler(largest, model.device)
        self._posts = PostBox(largest, model.device)
        self._last = torch.zeros(largest, dtype=torch.int64, device=model.device)  # what the last step sampled
        self._foreseen: Forward | None = None
        self._mixed: MixedGraphs | None = None
        self.outputs: Tensor | None = None  # what the head of a HeadedDecoder gave in the last step
        buffers = plain, sharing, sliding
        self._graphs = StepGraphs(cache, partial(self._compute, model), capture, *buffers)
        self._of_target = None
        if target is not None:
            self._of_target = StepGraphs(cache, partial(self._compute, target), capture, *buffers)
        self._of_adapted = None
        if adapted.serves:
            self._of_adapted = StepGraphs(cache, partial(self._compute, model, adapts=True), capture, *buffers)
            adapted.use(None)

    @property
    def largest(self) -> int:
        """The most rows of a step."""
        return self._graphs.plain.largest

    def foresee(self, sequence_ids: tuple[int, ...], sampling: SampleBatch, positions: Int64Array) -> None:
        """See ModelRunner.foresee."""
        if self._adapted.any(sequence_ids):
            self._foreseen = None
            return
        (_, buffers), tokens = self._graphs.choose(sequence_ids, len(sequence_ids)), np.zeros_like(positions)
        inputs = [*pack_inputs(tokens, tokens, 0, sampling, positions), *self._adapted.inputs(sequence_ids, None)]
        forward = self._cache.foresee(buffers, sequence_ids, inputs)
        self._foreseen = forward if (sampling.num_logprobs == NO_LOGPROBS).all() else None

    @torch.inference_mode()
    def step_foreseen(self, sequence_ids: tuple[int, ...], tokens: Int64Array) -> PendingSamples | None:
        """See ModelRunner.step_foreseen."""
        forward, self._foreseen = self._foreseen, None
        if forward is None or forward.buffers is None or forward.seq_ids != sequence_ids:
            return None
        ticket = self._posts.next_ticket()
        if forward.is_next is None or not forward.is_next():
            return None
        forward.buffers.send([tokens, np.full_like(tokens, ON_HOST), np.full_like(tokens, ticket)])
        self._graphs.plain.replay(forward.buffers)
        self._cache.commit(forward)
        return self._posts.expect(ticket, tokens.size)

    @torch.inference_mode()
    def step(
        self,
        sequence_ids: Sequence[int] | Int64Array,
        tokens: Int64Array,
        sources: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
        appends: Int64Array | None = None,
        scratch: int = 0,
        *,
        follows: bool = False,
        alone: bool = False,
        without_states: bool = False,
    ) -> PendingSamples:
        """Launches one step; see ModelRunner.step. appends: int64 [n], the tokens of each sequence, of a verify step;
        the other arrays have an element a token. scratch, without_states: see Batch. follows: see ModelRunner.verify.
        alone: without what drafts, if the model has it."""
        rows = tokens.size
        self._foreseen = None  # its buffers are filled with something else
        ticket = self._posts.next_ticket()
        inputs = pack_inputs(tokens, sources, ticket, sampling, None if follows else positions)
        inputs += self._adapted.inputs(sequence_ids, appends)
        slides = self._cache.any_slides(sequence_ids)
        of = self._of_target if alone and self._of_target is not None else self._graphs
        if self._of_adapted is not None and self._adapted.any(sequence_ids):
            of = self._of_adapted
        if not of.takes(rows, slides=slides):
            return self._pending(ticket, self._step_eagerly(sequence_ids, inputs), sampling, positions)
        graphs, buffers = of.choose(sequence_ids, rows, slides=slides)
        batch = Batch(
            sequence_ids, appends, scratch=scratch, drafted=appends is not None, without_states=without_states
        )
        forward = self._cache.begin(batch, buffers, inputs)
        logits = graphs.replay(buffers)[:rows]
        self._cache.commit(forward)
        return self._pending(ticket, logits, sampling, positions)

    def take(self, tokens: Tensor) -> None:
        """Makes these tokens, int64 [n] on the device, the last samples for the next step."""
        self._last[: tokens.shape[0]].copy_(tokens)

    def _step_eagerly(self, sequence_ids: Sequence[int] | Int64Array, inputs: Sequence[Int64Array]) -> Tensor:
        """Runs a step without a graph: one of its rows slides, and it has more rows than such graphs."""
        forward = self._cache.begin(Batch(sequence_ids))
        self._adapted.begin(forward)
        tokens, sources, tickets, parameters = unpack_inputs(upload(inputs[:NUM_INPUTS], self._last.device))
        rows = tokens.shape[0]
        ids = self._sampler.inputs(tokens, sources, self._last)
        logits = self._model.forward(ids, forward.attention, None)
        self._cache.commit(forward)
        self._sampler.sample(logits, parameters, self._last[:rows], tickets, self._posts.words)
        return logits

    def capture_with_prompts(self, prompts: Sequence[GraphBuffers], capture: Capture) -> None:
        """Captures steps with prompt chunks, of some sizes of either. prompts: ascending buffers of prompts."""
        largest, (least, most) = self._graphs.plain.largest, MIXED_TOKENS
        prompts = [one for one in prompts if least <= one.size <= most]
        steps = [one for one in self._graphs.plain.buffers if one.size in MIXED_ROWS or one.size == largest]
        side = torch.cuda.Stream(self._model.device) if self._model.device.type == "cuda" else None
        self._mixed = MixedGraphs(steps, prompts, capture, partial(self._compute_with_prompts, side))

    @property
    def mixed_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows, and tokens of prompts, of the graphs that hold both, ascending; empty where none was captured."""
        return ((), ()) if self._mixed is None else self._mixed.sizes

    def takes_prompts(self, num_rows: int, num_sequences: int, num_tokens: int) -> bool:
        """Whether a graph holds a step of so many rows with so many tokens of prompts."""
        return self._mixed is not None and self._mixed.takes(num_rows, num_sequences, num_tokens)

    @torch.inference_mode()
    def step_with_prompts(
        self,
        sequence_ids: Sequence[int] | Int64Array,
        inputs: StepInputs,
        prompts: Batch,
        token_ids: Int64Array,
        last_rows: Int64Array,
    ) -> tuple[PendingSamples, Tensor]:
        """Launches one step and, in the same graph, prompt chunks that takes_prompts() holds.

        token_ids int64 [T], last_rows int64 [n]: see ModelRunner.launch. See ModelRunner.step_with_prompts.
        """
        assert self._mixed is not None, "takes_prompts() is asked first"
        rows = len(sequence_ids)
        self._foreseen = None
        step_buffers, prompt_buffers = self._mixed.choose(rows, token_ids.size)
        ticket = self._posts.next_ticket()
        packed = pack_inputs(inputs.tokens, inputs.sources, ticket, inputs.sampling, inputs.positions)
        packed += self._adapted.inputs(sequence_ids, None)
        chunks = self._cache.begin(prompts, prompt_buffers, [token_ids, last_rows])
        step = self._cache.begin(Batch(sequence_ids), step_buffers, packed)
        logits = self._mixed.replay(step_buffers, prompt_buffers)
        self._cache.commit(step)
        self._cache.commit(chunks)
        behind_prompts = logits[step_buffers.size :][: last_rows.size].clone()
        return self._pending(ticket, logits[:rows], inputs.sampling, inputs.positions), behind_prompts

    def _compute_with_prompts(
        self, side: torch.cuda.Stream | None, buffers: GraphBuffers, prompts: GraphBuffers
    ) -> Tensor:
        """side: see MixedAttention."""
        num_rows, (prompt_ids, last_rows) = buffers.size, prompts.inputs
        attention = MixedAttention(buffers.attention(by_layers=True), prompts.attention(), num_rows, side)
        tokens, sources, tickets, parameters = unpack_inputs(buffers.inputs[:NUM_INPUTS])
        self._adapted.use(None)
        ids = torch.cat((self._sampler.inputs(tokens, sources, self._last), prompt_ids))
        wanted = torch.cat((torch.arange(num_rows, device=ids.device), last_rows + num_rows))
        logits = self._model.forward(ids, attention, wanted)
        own = logits[:num_rows]
        self._sampler.sample(own, parameters, self._last[:num_rows], tickets, self._posts.words)
        return logits

    def _pending(self, ticket: int, logits: Tensor, sampling: SampleBatch, positions: Int64Array) -> PendingSamples:
        if sampling.rules is None:
            return self._posted(ticket, logits, sampling)

        def sample(masks: Int32Array | None = None) -> PendingSamples:
            self._sample_behind(ticket, logits, sampling, masks, positions)
            return self._posted(ticket, logits, sampling)

        return LateSamples(sample) if sampling.is_guided else sample()

    def _posted(self, ticket: int, logits: Tensor, sampling: SampleBatch) -> PendingSamples:
        rows = logits.shape[0]
        logprobs = logprobs_of(logits, self._last[:rows], sampling.num_logprobs)
        return self._posts.expect(ticket, rows) if logprobs is None else CopiedSamples(self._last[:rows], logprobs)

    @torch.inference_mode()
    def _sample_behind(
        self,
        ticket: int,
        logits: Tensor,
        sampling: SampleBatch,
        masks: Int32Array | None,
        positions: Int64Array,
    ) -> None:
        """Samples a step after its graph, which has sampled the best tokens for nothing (decision 0074)."""
        tickets, parameters = unpack_sampling(upload(pack_sampling(ticket, sampling, positions), logits.device))
        assert sampling.rules is not None
        processed = self._processor.process(logits, sampling.rules, positions, masks)
        self._sampler.sample(processed.logits, parameters, self._last, tickets, self._posts.words)
        self._processor.count(processed, self._last)

    def _compute(self, model: Decoder, buffers: GraphBuffers, *, adapts: bool = False) -> Tensor:
        """adapts: whether rows may have adapters."""
        drafts = self._next_drafts
        shift = None if drafts is None else partial(drafts.follow, buffers)
        attention = buffers.attention(by_layers=adapts, shift=shift)  # no megakernel computes adapters
        tokens, sources, tickets, parameters = unpack_inputs(buffers.inputs[:NUM_INPUTS])
        self._adapted.use(buffers.inputs[NUM_INPUTS] if adapts else None)
        inputs = self._sampler.inputs(tokens, sources, self._last)
        logits = model.forward(inputs, attention, None)
        self._sampler.sample(logits, parameters, self._last[: buffers.size], tickets, self._posts.words)
        if drafts is not None:
            drafts.accept(buffers, self._last)
        if model.follow is not None:
            outputs = model.follow(self._last[: buffers.size], attention)
            if self.outputs is None:  # the largest comes first
                self.outputs = torch.empty_like(outputs)
            self.outputs[: buffers.size].copy_(outputs)
        return logits
