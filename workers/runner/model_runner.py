"""Runs a batch and its token ids, up to sampled tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.base import Limits
from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.adapters.adapted_rows import AdaptedRows
from tandem.workers.adapters.adapters import Adapters
from tandem.workers.models.drafters.load import Model
from tandem.workers.runner.batch_buckets import (
    MOST_PROMPTS,
    GraphSizes,
    bucket_sizes,
    prompt_sizes,
    step_limits,
    verify_sizes,
)
from tandem.workers.runner.decode_graphs import DecodeGraphs
from tandem.workers.runner.draft_chain import NUM_CHAIN_INPUTS
from tandem.workers.runner.drafts import Noted, make_drafts
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.encoder_prompts import (
    LeftOfPrompts,
    PromptChunks,
    encode,
    encoded,
    ends_of,
    pooled_prompts,
    scored_prompts,
)
from tandem.workers.runner.forward_graphs import Capture, ForwardGraphs, GraphCapture
from tandem.workers.runner.logits_processor import LogitsProcessor
from tandem.workers.runner.next_drafts import NextDrafts
from tandem.workers.runner.step_inputs import NUM_INPUTS, StepInputs
from tandem.workers.runner.stream_mark import mark_stream
from tandem.workers.runner.verify_rows import VerifyRows
from tandem.workers.sampling.pending_samples import LateSamples, PendingSamples, Samples
from tandem.workers.sampling.pooling import Pooled, Reading
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, Scored
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams


class ModelRunner:
    """Runs the model over packed tokens of several sequences; the cache does attention and stores KV.

    Every forward goes the same way: the cache begins it, eager or in graph buffers; the model computes it, or the graph
    that was captured for these buffers is replayed; the cache commits it.
    """

    def __init__(self, model: Model, cache: PagedKVCache, adapters: Adapters | None = None) -> None:
        self._model = model
        self.adapters, self._adapted = adapters, AdaptedRows(adapters, model.device)
        self._cache = cache
        self._processor = LogitsProcessor(model.device)
        self._eager_sampler = EagerSampler(model.device, self._processor)
        self._verify_sampler = EagerSampler(model.device, self._processor)  # another half is under way with prompts'
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: ForwardGraphs | None = None
        self._verify_graphs: DecodeGraphs | None = None
        self._verify_rows: VerifyRows | None = None  # of the last verify step
        self.next_drafts: NextDrafts | None = None  # where verify steps can follow one another
        self.drafts = make_drafts(model.draft_steps(), cache, self._processor)  # by a model, or by a head of the target
        self._foreseen_positions = np.zeros(0, np.int64)

    def warm_up(self) -> None:
        """A prompt and a step of a sequence of its own: what torch prepares at first use, no request then waits for."""
        sequence, size = -1, self._cache.layout.page_size
        length = min(2 * size, self._cache.pages.total * size - 1, self._cache.max_sequence_length - 1)
        greedy = SampleBatch.from_params([SamplingParams(temperature=0)])
        encodes = self._model.config.encoder is not None
        self._cache.add_sequence(sequence, 1 if encodes else 0)
        if encodes:
            length = min(length, self._cache.max_sequence_length - size - 1)
            encode(self._model, self._cache, [sequence], [np.zeros(1, np.int64)], push=False)
        for count in filter(None, (length, 1)):
            logits = self.launch(Batch([sequence], [count]), np.zeros(count, np.int64), np.array([count - 1]))
            self.sample(logits, greedy, np.array([count]))
        self._cache.remove_sequence(sequence)

    def capture_steps(self, max_sequences: int, capture: Capture | None = None) -> None:
        """Makes step() replay CUDA graphs of up to max_sequences rows from now on, where device, kernels and model
        can."""
        if capture is None and self._model.device.type != "cuda":
            return
        heads, inputs = self._model.config.num_heads, NUM_INPUTS + self._adapted.num_inputs
        plain, sharing, sliding = map(self._cache.graph_buffers, step_limits(max_sequences, heads, inputs))
        if plain:
            capture = capture or GraphCapture()
            rest = capture, self._processor, sliding, None, self._model.target, self._adapted
            self._graphs = DecodeGraphs(self._model, self._cache, plain, sharing, *rest)

    def capture_prompts(self, max_tokens: int, capture: Capture | None = None) -> None:
        """Makes launch() replay CUDA graphs of up to max_tokens that push nothing, as capture_steps does."""
        if capture is None and self._model.device.type != "cuda":
            return
        config, most = self._model.config, MOST_PROMPTS * self._cache.max_sequence_length
        sizes = [size for size in prompt_sizes(max_tokens, config.hidden_size) if size <= most]
        buffers = self._cache.graph_buffers([Limits.of_prompts(size, MOST_PROMPTS, config.num_heads) for size in sizes])
        if buffers:
            self._prompt_graphs = ForwardGraphs(buffers, capture or GraphCapture(), self._compute_prompts)

    def capture_verification(self, max_tokens: int, capture: Capture | None = None, max_ngram: int = 0) -> None:
        """Makes verify() replay CUDA graphs of up to max_tokens, as capture_steps does. max_ngram: of drafts that the
        device looks up itself, see NgramDrafter; 0: it does not, but a model may draft."""
        if capture is None and self._model.device.type != "cuda":
            return
        heads, inputs = self._model.config.num_heads, NUM_INPUTS + self._adapted.num_inputs
        sizes = verify_sizes(max_tokens)
        buffers = self._cache.graph_buffers([Limits.of_verification(size, heads, inputs) for size in sizes])
        if buffers:
            if (max_ngram or self.drafts is not None) and buffers[0].shifts_rows:
                length, device = self._cache.max_sequence_length, self._model.device
                self.next_drafts = NextDrafts(max_tokens - 1, length, max_ngram, device)  # one row has a draft
            graphs = capture or GraphCapture(), self._processor, (), self.next_drafts, None, self._adapted
            self._verify_graphs = DecodeGraphs(self._model, self._cache, buffers, (), *graphs)

    def capture_drafts(self, max_sequences: int, most: int, capture: Capture | None = None) -> None:
        """Makes drafts.draft() replay CUDA graphs of up to max_sequences rows, as capture_steps does, and
        drafts.draft_behind() graphs of drafts of up to `most` tokens. capture_verification comes first."""
        if self.drafts is None or (capture is None and self._model.device.type != "cuda"):
            return
        capture, heads, sizes = capture or GraphCapture(), self.drafts.num_heads, bucket_sizes(max_sequences)
        buffers = self._cache.graph_buffers([Limits.of_step(size, heads, NUM_INPUTS) for size in sizes])
        if buffers:
            self.drafts.capture(buffers, capture)
        chains = self._cache.graph_buffers([Limits.of_chain(size, heads, NUM_CHAIN_INPUTS) for size in sizes])
        if chains and self.next_drafts is not None and self._verify_graphs is not None:
            self.drafts.capture_chains(self.next_drafts, chains, self._verify_graphs.outputs, most, capture)

    @property
    def overlaps(self) -> bool:
        """Whether scheduling overlaps: step() does not wait for its tokens, and itself takes those before."""
        return self._graphs is not None

    def step(
        self,
        sequence_ids: Sequence[int] | Int64Array,
        tokens: Int64Array,
        sources: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
        *,
        alone: bool = False,
    ) -> PendingSamples:
        """One more token for each of n sequences.

        Arrays are int64 [n]. sources[i]: the row of the step before that samples the input of row i, or -1 where it is
        tokens[i], as it must be unless overlaps. positions: as for sample(). alone: a graph may leave out what drafts,
        whose KV then lacks these positions: no sequence wants a draft any more. LateSamples where rows are guided.
        """
        if self._graphs is not None:
            pending = self._graphs.step(sequence_ids, tokens, sources, sampling, positions, alone=alone)
            self._note(None if alone else self._graphs.outputs, sequence_ids, positions)
            return pending
        return self._sampled(Batch(sequence_ids), tokens, self._eager_sampler, sampling, positions, positions)

    def verify(
        self,
        sequence_ids: Sequence[int],
        tokens: Sequence[Int64Array],
        sampling: SampleBatch,
        positions: Int64Array,
        *,
        follows: bool = False,
    ) -> PendingSamples:
        """Computes tokens[i] of each of n sequences: its last token and a draft, int64 [1 + k]. Samples a token after
        each, with the parameters of its sequence.

        positions: int64 [n], of the first token sampled for each sequence, as for sample(). A row with LogitRules has
        no draft. No step is in flight, unless it follows. LateSamples where rows are guided.

        follows: the verify step before, of the same sequences, is in a graph, and may not be read yet. The device puts
        in the tokens itself. positions are as if all drafts of that step were accepted. See next_drafts.
        """
        appends = np.array([one.size for one in tokens])
        rows = self._verify_rows
        if rows is None or not rows.are_of(appends, sampling):
            self._verify_rows = rows = VerifyRows(appends, sampling)
        token_ids, each = np.concatenate(tokens), positions[rows.rows] + rows.offsets
        if (graphs := self._verify_graphs) is not None and token_ids.size <= graphs.largest:
            sources = rows.followers if follows else rows.sources
            pending = graphs.step(sequence_ids, token_ids, sources, rows.sampling, each, appends, follows=follows)
            self._note(graphs.outputs, sequence_ids, positions, appends)
            return pending
        batch = Batch(sequence_ids, appends, push=False, drafted=True)
        return self._sampled(batch, token_ids, self._verify_sampler, rows.sampling, each, positions)

    @torch.inference_mode()
    def _sampled(
        self,
        batch: Batch,
        token_ids: Int64Array,
        sampler: EagerSampler,
        sampling: SampleBatch,
        positions: Int64Array,
        first: Int64Array,
    ) -> PendingSamples:
        """An eager step of the batch, and a token after each of token_ids. first: positions of the first one of each
        sequence."""
        follow = self._model.follow
        if follow is None:
            rows = None if batch.append_lengths is None else np.arange(token_ids.size)
            return sampler.sample_step(self.launch(batch, token_ids, rows), sampling, positions)
        forward = self._cache.begin(batch)
        logits = self.forward(token_ids, forward, None)

        @torch.inference_mode()
        def sample(masks: Int32Array | None = None) -> PendingSamples:
            pending = sampler.sample(logits, sampling, positions, masks)
            outputs = follow(sampler.sampled[: token_ids.size], forward.attention)
            self._cache.commit(forward)
            appends = None if batch.append_lengths is None else np.array(batch.append_lengths)
            self._note(outputs, batch.seq_ids, first, appends)
            return pending

        return LateSamples(sample) if sampling.is_guided else sample()

    def _note(
        self,
        outputs: Tensor | None,
        sequence_ids: Sequence[int] | Int64Array,
        positions: Int64Array,
        appends: Int64Array | None = None,
    ) -> None:
        """See Drafts.note."""
        if self.drafts is not None and self.drafts.ahead:
            self.drafts.note(None if outputs is None else Noted(outputs, sequence_ids, positions, appends))

    def foresee(self, sequence_ids: tuple[int, ...], sampling: SampleBatch, positions: Int64Array) -> None:
        """They are being received, and will be stepped next, with tokens not known yet."""
        if self._graphs is not None:
            self._foreseen_positions = positions
            self._graphs.foresee(sequence_ids, sampling, positions)

    def step_foreseen(self, sequence_ids: tuple[int, ...], tokens: Int64Array) -> PendingSamples | None:
        """step() of what was foreseen last, with these tokens: launched at once. None, and nothing happens, where that
        cannot be; then step() can."""
        pending = None if self._graphs is None else self._graphs.step_foreseen(sequence_ids, tokens)
        if pending is not None and self._graphs is not None:
            self._note(self._graphs.outputs, sequence_ids, self._foreseen_positions)
        return pending

    def mark(self) -> Callable[[], bool] | None:
        """Says whether all that was launched so far is done or has failed; None where nothing is under way."""
        return mark_stream(self._model.device)

    def drain(self) -> None:
        """Waits for all that was launched; raises what the device reports."""
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def has_prompt_graph(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether a graph computes a forward of so many tokens of prompts that nothing is pushed with."""
        return self._prompt_graphs is not None and self._prompt_graphs.takes(num_sequences, num_tokens)

    @torch.inference_mode()
    def prompts(self, prompts: PromptChunks, *, push: bool) -> tuple[Tensor, LeftOfPrompts | None]:
        """Computes, or at least launches, the chunks; push: what is marked to be sent goes along. Logits [n, vocab]
        that follow those n of the prompts that end here, and what comes once these are sampled, if a head drafts."""
        model, cache = self._model, self._cache
        sequence_ids, chunks, lengths = prompts = encoded(model, cache, prompts, push=push)
        if not chunks:  # encoders' prompts alone
            return torch.empty(0, model.config.vocab_size, dtype=torch.float32, device=model.device), None
        appends, last_rows = self._ends(prompts)
        token_ids = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        batch, begin = Batch(sequence_ids, appends, lengths, push=push), model.begin_prompts
        if begin is None or not last_rows.size or self._prompt_buffers(batch, token_ids, last_rows) is not None:
            return self.launch(batch, token_ids, last_rows), None
        forward = cache.begin(batch)
        self._adapted.begin(forward)
        ids, rows = upload([token_ids, last_rows], model.device)
        logits, follow = begin(ids, forward.attention, rows)
        return logits, LeftOfPrompts(cache, forward, follow)

    @torch.inference_mode()
    def scored_prompts(
        self, prompts: PromptChunks, scored: Sequence[Scored | None], *, push: bool
    ) -> tuple[Tensor, list[PackedLogprobs]]:
        """Computes prompts() eagerly, see scored_prompts()."""
        return scored_prompts(self._model, self._cache, prompts, scored, self._adapted.begin, push=push)

    @torch.inference_mode()
    def pooled_prompts(self, prompts: PromptChunks, readings: Sequence[Reading | None]) -> Pooled:
        """Computes the chunks, eagerly, for readings of them: see pooled_prompts()."""
        return pooled_prompts(self._model, self._cache, prompts, readings, self._adapted.begin)

    def _ends(self, prompts: PromptChunks) -> tuple[Int64Array, Int64Array]:
        """See ends_of()."""
        return ends_of(self._cache, prompts)

    def capture_steps_with_prompts(self, capture: Capture | None = None) -> None:
        """Makes step_with_prompts() replay CUDA graphs from now on; capture_steps and capture_prompts come first."""
        graphs, prompts = self._graphs, self._prompt_graphs
        if graphs is not None and prompts is not None:
            graphs.capture_with_prompts(prompts.buffers, capture or GraphCapture())

    @property
    def graph_sizes(self) -> GraphSizes:
        """The sizes of the graphs captured so far. Without graphs of steps one eager forward takes rows and chunks."""
        rows, chunks = ((), ()) if self._graphs is None else self._graphs.mixed_sizes
        prompts = () if self._prompt_graphs is None else self._prompt_graphs.sizes
        return GraphSizes(self._graphs is None or bool(chunks), rows, chunks, prompts)

    def takes_prompts(self, sequence_ids: Sequence[int], num_sequences: int, num_tokens: int) -> bool:
        """Whether step_with_prompts() can compute a step of these rows with so many tokens of prompts. Prompts have
        no adapters where graphs compute steps."""
        graphs = self._graphs
        if graphs is None:
            return True
        if self._adapted.any(sequence_ids) or self._cache.any_slides(sequence_ids):
            return False
        return graphs.takes_prompts(len(sequence_ids), num_sequences, num_tokens)

    def step_with_prompts(
        self, sequence_ids: Sequence[int], inputs: StepInputs, prompts: PromptChunks
    ) -> tuple[PendingSamples, Tensor]:
        """step() and all of prompts() in one forward, which reads the weights once; nothing is pushed with it."""
        prompts = encoded(self._model, self._cache, prompts, push=False)
        appends, last_rows = self._ends(prompts)
        self._note(None, sequence_ids, inputs.positions)
        if self._graphs is None:
            return self._eager_step_with_prompts(sequence_ids, inputs, prompts, last_rows)
        batch = Batch(prompts.sequence_ids, appends, prompts.lengths, push=False)
        return self._graphs.step_with_prompts(sequence_ids, inputs, batch, np.concatenate(prompts.chunks), last_rows)

    def _eager_step_with_prompts(
        self, sequence_ids: Sequence[int], inputs: StepInputs, prompts: PromptChunks, last_rows: Int64Array
    ) -> tuple[PendingSamples, Tensor]:
        rows = len(sequence_ids)
        batch = Batch(
            [*sequence_ids, *prompts.sequence_ids],
            np.array([1] * rows + [chunk.size for chunk in prompts.chunks], np.int64),
            np.concatenate((inputs.positions, np.array(prompts.lengths, np.int64))),
            push=False,
        )
        token_ids = np.concatenate((inputs.tokens, *prompts.chunks))
        logits = self.launch(batch, token_ids, np.concatenate((np.arange(rows), rows + last_rows)))
        return self._eager_sampler.sample_step(logits[:rows], inputs.sampling, inputs.positions), logits[rows:]

    @torch.inference_mode()
    def launch(self, batch: Batch, token_ids: Int64Array, last_rows: Int64Array | None) -> Tensor:
        """Logits [n, vocab] that follow rows last_rows (int64 [n]; None: all) of token_ids (int64 [T]), the new tokens
        of the batch's sequences one after another: prompt chunks, decodes and drafts to be verified, in one forward."""
        buffers = self._prompt_buffers(batch, token_ids, last_rows)
        if buffers is None or last_rows is None or self._prompt_graphs is None:
            forward = self._cache.begin(batch)
            logits = self.forward(token_ids, forward, last_rows)
        else:
            forward = self._cache.begin(batch, buffers, [token_ids, last_rows])
            logits = self._prompt_graphs.replay(buffers)[: last_rows.size].clone()
        self._cache.commit(forward)
        return logits

    def _prompt_buffers(self, batch: Batch, token_ids: Int64Array, last_rows: Int64Array | None) -> GraphBuffers | None:
        """The buffers of the graph that computes the batch; None: it is computed eagerly."""
        graphs, trees = self._prompt_graphs, batch.token_tree_parents is not None
        if graphs is None or last_rows is None or batch.push or trees or self._adapted.any(batch.seq_ids):
            return None
        rows = max(len(batch.seq_ids), last_rows.size)
        return graphs.choose(token_ids.size) if graphs.takes(rows, token_ids.size) else None

    def _compute_prompts(self, buffers: GraphBuffers) -> Tensor:
        token_ids, last_rows = buffers.inputs
        self._adapted.use(None)
        return self._model.forward(token_ids, buffers.attention(), last_rows)

    @torch.inference_mode()
    def forward(self, token_ids: Int64Array, forward: Forward, last_rows: Int64Array | None) -> Tensor:
        """launch() of what the cache has begun without buffers, which the caller commits."""
        arrays = [token_ids] if last_rows is None else [token_ids, last_rows]
        ids, *rows = upload(arrays, self._model.device)
        self._adapted.begin(forward)
        return self._model.forward(ids, forward.attention, rows[0] if rows else None)

    def sample_async(
        self, logits: Tensor, batch: SampleBatch, positions: Int64Array, masks: Int32Array | None = None
    ) -> tuple[Tensor, PendingSamples]:
        """One token a row; positions int64 [n] are the indices, in their sequences, of the tokens to be sampled. masks:
        of guided rows. Also int64 [n or more], on the device, until the next sample_async()."""
        pending = self._eager_sampler.sample(logits, batch, positions, masks)
        return self._eager_sampler.sampled, pending

    def sample(self, logits: Tensor, batch: SampleBatch, positions: Int64Array) -> Samples:
        """Calls sample_async(), and waits for the samples."""
        return self.sample_async(logits, batch, positions)[1].wait()
