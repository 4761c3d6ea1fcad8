"""From token ids and a plan to sampled tokens."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan import ForwardPlan
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.sample_batch import SampleBatch
from tandem.workers.sampling import Sampler
from tandem.workers.sampling_params import SamplingParams
from tandem.workers.token_logprobs import TokenLogprobs, split_logprobs

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Samples:
    """token_ids int64 [n]; logprobs has n entries, None where a row did not ask."""

    token_ids: Int64Array
    logprobs: list[TokenLogprobs | None]


class ModelRunner:
    """Runs the model over packed tokens of several sequences; the cache does attention and stores KV."""

    def __init__(self, model: DenseDecoder, cache: PagedKVCache) -> None:
        self._model = model
        self._cache = cache
        self._sampler = Sampler()

    def warm_up(self) -> None:
        """A prompt and a step of a sequence of its own: what torch prepares at first use, no request then waits for."""
        sequence = -1
        length = min(2 * self._cache.layout.page_size, self._cache.num_pages * self._cache.layout.page_size - 1)
        greedy = SampleBatch.from_params([SamplingParams(temperature=0)])
        self._cache.add_sequence(sequence)
        for count in (length, 1):
            plan = self._cache.begin_forward([sequence], [count])
            logits = self.forward(np.zeros(count, np.int64), plan, np.array([count - 1]))
            self._cache.end_forward(plan)
            self.sample(logits, greedy, np.array([count]))
        self._cache.remove_sequence(sequence)

    @torch.inference_mode()
    def forward(self, token_ids: Int64Array, plan: ForwardPlan, last_rows: Int64Array | None) -> Tensor:
        """Logits float32 [n, vocab] that follow rows last_rows (int64 [n]; None: all) of token_ids int64 [T]."""
        arrays = [token_ids] if last_rows is None else [token_ids, last_rows]
        ids, *rows = upload(arrays, self._model.device)
        return self._model.forward(ids, partial(self._cache.attention, plan), rows[0] if rows else None)

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SampleBatch, positions: Int64Array) -> Samples:
        """One token a row; positions int64 [n] are the indices, in their sequences, of the tokens to be drawn."""
        tokens, logprobs = self._sampler.sample(logits, batch, positions)
        token_ids = tokens.cpu().numpy()
        return Samples(token_ids, split_logprobs(logprobs, token_ids.tolist()))
