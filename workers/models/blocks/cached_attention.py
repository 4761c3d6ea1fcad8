"""The cache in one forward, as the blocks of a model see it."""

from typing import Protocol

from torch import Tensor

from tandem.cache.kernels.base import Compression, Index, StepPages
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.temperature import Temperature


class CachedAttention(Protocol):
    """The cache in one forward. It norms heads of q and k, rotates them, keeps K and V, and attends."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """o [T, Hq, D] of q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] or None."""
        ...

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        """o [T, Hq, D] of q [T, Hq, D] over K and V that another layer, or this one, has stored in this forward."""
        ...

    def step_pages(self, layers: range) -> StepPages | None:
        """Returns the pages of a decode step, for a kernel that attends in these layers; None where each must call
        attend()."""
        ...

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """o [T, H, value_dim]; see Attention.attend_latents of tandem.cache. May overwrite q, latents and keys."""
        ...

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """o [T, Hq, D] of q [T, Hq, D] and kv [T, 1, D]; see Attention.attend_shared."""
        ...

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        """o [T, heads, output_dim]; see Attention.recur."""
        ...

    def temperatures(self, rule: Temperature) -> Tensor:
        """float32 [T, 1, 1]: by what the q of each new token is multiplied, computed once a forward."""
        ...


class EncoderStore(Protocol):
    """The cache in a forward of an encoder."""

    def store_given(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keeps K and V [T, Hkv, D] of the encoder's positions, as they are, for CachedAttention.read later."""
        ...
