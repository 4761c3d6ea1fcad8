"""Decode steps as CUDA graphs, one for each batch size of a few: a step costs the host one launch, not hundreds."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.fixed_batch import FixedBatch
from tandem.cache.paged_cache import PagedKVCache
from tandem.workers.batch_buckets import bucket_of
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.pending_samples import PendingSamples
from tandem.workers.planned_attention import PlannedAttention
from tandem.workers.sample_batch import GREEDY_BELOW, NO_LOGPROBS, SampleBatch
from tandem.workers.sampling import Sampler

Int64Array = NDArray[np.int64]
Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Takes a computation on fixed memory; returns what repeats it, and gives its result's memory."""


class DecodeGraphs:
    """Each step's graph takes its input tokens from the step before, on the device, or from the host; then embeds,
    attends and takes the best tokens. Rows that are drawn, or report log-probabilities, are sampled after it.

    So a step can be launched before the host knows what the one before has drawn.
    """

    def __init__(
        self, model: DenseDecoder, cache: PagedKVCache, batches: Sequence[FixedBatch], capture: Capture
    ) -> None:
        """batches: PagedKVCache.fixed_batches, with two inputs, in ascending order; captures a graph for each."""
        self._model = model
        self._cache = cache
        self._batches = batches
        self._sizes = [batch.size for batch in batches]
        self._sampler = Sampler()
        self._last = torch.zeros(self._sizes[-1], dtype=torch.int64, device=model.device)  # what the last step drew
        replays = []
        for batch in reversed(batches):  # the largest first: the smaller ones then fit into its memory
            batch.clear()
            replays.append(capture(partial(self._compute, batch)))
        self._replays: list[Replay] = replays[::-1]

    @torch.inference_mode()
    def step(
        self,
        sequence_ids: Int64Array,
        tokens: Int64Array,
        sources: Int64Array,
        sampling: SampleBatch,
        positions: Int64Array,
    ) -> PendingSamples:
        """Launches one step; see ModelRunner.step."""
        rows = len(sequence_ids)
        place = bucket_of(self._sizes, rows)
        self._cache.begin_fixed(self._batches[place], sequence_ids, [tokens, sources])
        logits = self._replays[place]()[:rows]
        if (sampling.temperature < GREEDY_BELOW).all() and (sampling.num_logprobs == NO_LOGPROBS).all():
            return PendingSamples(self._last[:rows], None)
        drawn, logprobs = self._sampler.sample(logits, sampling, positions)
        self._last[:rows].copy_(drawn)
        return PendingSamples(drawn, logprobs)

    def _compute(self, batch: FixedBatch) -> Tensor:
        tokens, sources = batch.inputs
        inputs = torch.where(sources < 0, tokens, self._last[sources.clamp(min=0)])
        logits = self._model.forward(inputs, PlannedAttention(self._cache, batch.plan()), None)
        self._last[: batch.size].copy_(logits.argmax(-1))
        return logits


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory: only the result of the last replay is to be read."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        compute()  # kernels are built and loaded outside the capture
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: a worker's own do not, a test's may.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
