"""Attention of a forward that is a decode step and prompt chunks at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.cache.attention.forward import Attention
from tandem.cache.kernels.base import Compression, Index
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.temperature import Temperature


class MixedAttention:
    """A CachedAttention: the first num_rows tokens belong to `steps`, in graph buffers; the others belong to `prompts`.

    Each part has the kernels that suit it. All else in a layer sees one batch, and so reads the weights once. On a GPU
    a layer's two parts run side by side. Reading the KV of rows waits for memory, prompts keep the tensor cores busy.

        current stream  … q, k, v ─┬─► attention of rows ───────────────────────┬─► output projection …
        side stream                └─► norm, append and attention of prompts ──┘
    """

    def __init__(self, steps: Attention, prompts: Attention, num_rows: int, side: torch.cuda.Stream | None) -> None:
        """side: of all such forwards of a worker, because memory that a stream has freed serves this stream alone.
        None: one part comes after the other."""
        self._steps, self._prompts = steps, prompts
        self._rows, self._rest = slice(None, num_rows), slice(num_rows, None)
        self._side = side

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """See CachedAttention."""
        return self._both(q, lambda part, of, out: part.attend(layer, q[of], k[of], v[of], sinks, norm, out))

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        """See CachedAttention."""
        return self._both(q, lambda part, of, out: part.read(layer, q[of], sinks, norm, out))

    def _both(self, q: Tensor, attend: Callable[[Attention, slice, Tensor], Tensor]) -> Tensor:
        """o [T, Hq, D]. attend: gives o of a part's tokens, and may write it into the tensor that it is given.

        Whatever either stream reads is made before they part, or is its own. Whatever the current stream frees is free
        after they meet again.
        """
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self._side is None:
            self._into(output, self._prompts, self._rest, attend)
            self._into(output, self._steps, self._rows, attend)
            return output
        current = torch.cuda.current_stream(q.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self._into(output, self._prompts, self._rest, attend)
        self._into(output, self._steps, self._rows, attend)
        current.wait_stream(self._side)
        return output

    @staticmethod
    def _into(output: Tensor, part: Attention, of: slice, attend: Callable[[Attention, slice, Tensor], Tensor]) -> None:
        own = output[of]
        made = attend(part, of, own)
        if made is not own:
            own.copy_(made)

    def step_pages(self, layers: range) -> None:
        """Returns None: no megakernel computes prompts."""

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention."""
        return torch.cat([part.temperatures(rule) for part in (self._steps, self._prompts)])

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """See CachedAttention; no graph holds such layers."""
        raise AssertionError(f"layer {layer} has K and V in one plane")

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """See CachedAttention; no graph holds prompts of such layers."""
        raise AssertionError(f"layer {layer} keeps latents")

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        """See CachedAttention; no graph holds such layers."""
        raise AssertionError(f"layer {layer} keeps a recurrent state")
