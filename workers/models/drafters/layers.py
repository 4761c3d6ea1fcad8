"""The attention of a drafter's layers, which stand after the target's in the cache's layout."""

from torch import Tensor

from tandem.cache.kernels.base import Compression, Index, StepPages
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.temperature import Temperature
from tandem.workers.models.blocks.cached_attention import CachedAttention


class LayersBehind:
    """A CachedAttention whose layer 0 is layer `first` of another."""

    def __init__(self, cached: CachedAttention, first: int) -> None:
        self._cached = cached
        self._first = first

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """See CachedAttention."""
        return self._cached.attend(self._first + layer, q, k, v, sinks, norm)

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        """See CachedAttention."""
        return self._cached.read(self._first + layer, q, sinks, norm)

    def step_pages(self, layers: range) -> StepPages | None:
        """See CachedAttention."""
        return self._cached.step_pages(range(self._first + layers.start, self._first + layers.stop))

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """See CachedAttention; no drafter has such layers."""
        raise AssertionError(f"layer {layer} has K and V in one plane")

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """See CachedAttention."""
        return self._cached.attend_latents(self._first + layer, q, latents, keys, up, choice)

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        """See CachedAttention; no drafter has such layers."""
        raise AssertionError(f"layer {layer} keeps a recurrent state")

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention; a forward has one rule, the target's."""
        raise AssertionError(f"a drafter has no temperatures: {rule}")
