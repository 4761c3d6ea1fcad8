"""The number of KV pages for which a worker's GPU has room next to the weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression, Index
from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.delta.scratch import Scratch, most_chunks
from tandem.cache.kernels.index_keys import SCORE_BYTES
from tandem.cache.kernels.recurrent import RecurrentInputs, StateShape
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import EXPANDED_POSITIONS, UpProjections, heads_at_once
from tandem.cache.plan.temperature import Temperature
from tandem.workers.errors import GpuTooSmall
from tandem.workers.models.drafters.load import Model
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.reserved_bytes import RESERVED_BYTES
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one GPU. used: by anybody, when the weights are loaded and the largest forward has run."""

    total: int
    used: int
    utilization: float

    def room(self, page_bytes: int) -> int:
        """Bytes for pages. GpuTooSmall when not even one fits. page_bytes: of one in all layer groups together."""
        room = int(self.total * self.utilization) - self.used - RESERVED_BYTES
        if room < page_bytes:
            least = (self.used + RESERVED_BYTES + page_bytes) / self.total
            advice = f"it must be at least {least:.3f}" if least <= 1 else "no value suffices: the model is too large"
            raise GpuTooSmall(
                f"cache.gpu_memory_utilization is {self.utilization:g}, of {gib(self.total)}: weights, workspace of "
                f"the largest forward and what else is in use take {gib(self.used)}, NVSHMEM, CUDA graphs and "
                f"FlashInfer {gib(RESERVED_BYTES)}, and no page of {page_bytes} bytes fits; {advice}"
            )
        return room


def measure_budget(
    model: Model, utilization: float, *, max_batch_tokens: int, max_sequences: int, max_positions: int
) -> MemoryBudget:
    """Measures the current CUDA device while it runs the largest forward.

    Everything in use counts, other processes' memory too. max_positions: what one forward can attend to.
    """
    torch.cuda.empty_cache()  # what loading has left must not count twice
    run_largest_forward(model, max_batch_tokens, max_sequences, max_positions)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return MemoryBudget(total, total - free, utilization)


@contextmanager
def on_the_gpu(what: str) -> Iterator[None]:
    """GpuTooSmall, in words, where torch gets no memory for `what` within the block."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
        raise GpuTooSmall(
            f"the GPU has no room for {what}: of {gib(total)} this worker has {gib(own)}, other processes have "
            f"{gib(total - free - own)}, and {gib(free)} are free; `nvidia-smi` names the processes"
        ) from None


class WithoutPages:
    """A CachedAttention that has no pages; its outputs mean nothing but have the right shape.

    Of latents it makes the K and V that kernels would have in memory together, of max_positions or as many as they
    expand; of an index the scores that they would have in memory together; of states what is kept between kernels.
    """

    def __init__(
        self, max_positions: int, positions: Tensor, states: StateShape | None = None, max_sequences: int = 1
    ) -> None:
        """positions: int64 [T], of the forward's tokens. states: of the layers that keep some. max_sequences: whose
        tokens these may be."""
        self._expanded = min(max_positions, EXPANDED_POSITIONS)
        self._positions, self._states, self._max_sequences = positions, states, max_sequences

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        if norm is not None:
            q, k = norm.apply(q, k)
        return torch.cat((q, k), 1)[:, : q.shape[1]]

    def store_given(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores nothing."""

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        return q.contiguous() if norm is None else norm.apply_to_queries(q)

    def step_pages(self, layers: range) -> None:
        """Returns no pages."""

    def temperatures(self, rule: Temperature) -> Tensor:
        return rule.factors(self._positions)

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """See CachedAttention; no GPU serves such layers."""
        raise AssertionError(f"layer {layer} has K and V in one plane")

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        assert self._states is not None, f"layer {layer} keeps no state"
        num_tokens = x.mixed.shape[0]
        output = x.mixed.new_zeros((num_tokens, self._states.heads, self._states.output_dim))
        chunks = most_chunks(num_tokens, self._max_sequences)
        Scratch.of(chunks, Heads.of(self._states), x.mixed.dtype, x.mixed.device)
        return output

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        _, num_heads, width = q.shape
        if choice is not None:
            q.new_zeros((SCORE_BYTES,), dtype=torch.uint8)
        entries = q.new_zeros((self._expanded, up.weight.shape[2] + width - up.heads.key_dim))
        up.of_heads(0, heads_at_once(num_heads, self._expanded)).keys_and_values(entries)
        return up.values(up.absorb(q[:, :, : up.heads.key_dim]))


@torch.inference_mode()
def run_largest_forward(model: Model, max_batch_tokens: int, max_sequences: int, max_positions: int) -> None:
    """max_batch_tokens tokens without attention, which needs pages, then sampling with top_p for max_sequences rows.
    In addition, what a head has left of another forward of prompts."""
    rows = min(max_batch_tokens, max_sequences)
    tokens = torch.zeros(max_batch_tokens, dtype=torch.int64, device=model.device)
    recurrent = model.config.recurrent
    without_pages = WithoutPages(max_positions, tokens, None if recurrent is None else recurrent.shape, max_sequences)
    if model.encode is not None and model.config.encoder is not None:
        longest = min(max_batch_tokens, model.config.encoder.max_positions)
        model.encode(tokens[:longest], [longest], [longest], without_pages)
    begin, pages, last_rows = model.begin_prompts, without_pages, tokens[:rows]
    left = None if begin is None else begin(tokens, pages, last_rows)  # of a speculative prompt
    logits = model.forward(tokens, pages, last_rows)
    del left
    batch = SampleBatch.from_params([SamplingParams(temperature=1.0, top_p=0.5, seed=0)] * rows)
    EagerSampler(model.device).sample(logits, batch, np.zeros(rows, np.int64)).wait()


def gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
