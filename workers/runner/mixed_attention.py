"""Attention of a forward that is a decode step and prompt chunks at once."""

import torch
from torch import Tensor

from tandem.cache.attention.forward import Attention
from tandem.cache.kernels.base import Compression, Index
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.temperature import Temperature


class MixedAttention:
    """A CachedAttention: the first num_rows tokens are those of `steps`, in graph buffers; the others are of `prompts`.

    Each part has the kernels that suit it. All else in a layer sees one batch, and so reads the weights once.
    """

    def __init__(self, steps: Attention, prompts: Attention, num_rows: int) -> None:
        self._parts = (steps, slice(None, num_rows)), (prompts, slice(num_rows, None))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """See CachedAttention."""
        return torch.cat([part.attend(layer, q[rows], k[rows], v[rows], sinks, norm) for part, rows in self._parts])

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        """See CachedAttention."""
        return torch.cat([part.read(layer, q[rows], sinks, norm) for part, rows in self._parts])

    def step_pages(self, layers: range) -> None:
        """No megakernel computes prompts."""

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention."""
        return torch.cat([part.temperatures(rule) for part, _ in self._parts])

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """See CachedAttention; no graph holds such layers."""
        raise AssertionError(f"layer {layer} has K and V in one plane")

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """See CachedAttention."""
        outputs = []
        for part, rows in self._parts:
            its = None if choice is None else Index(*(x[rows] for x in choice))
            outputs.append(part.attend_latents(layer, q[rows], latents[rows], keys[rows], up, its))
        return torch.cat(outputs)
