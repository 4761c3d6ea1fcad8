"""The decoder's attention over the cache's pages, for the sequences of one plan."""

from dataclasses import dataclass

from torch import Tensor

from tandem.cache.attention.forward_plan import ForwardPlan
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections


@dataclass(frozen=True, eq=False)
class PlannedAttention:
    """See CachedAttention."""

    cache: PagedKVCache
    plan: ForwardPlan

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        if norm is not None:
            q, k = norm.apply(q, k)
        return self.cache.attention(self.plan, layer, q, k, v, sinks)

    def step_pages(self) -> None:
        """A plan's arrays do not stay where they are: there is no whole step over them."""

    def attend_latents(self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections) -> Tensor:
        return self.cache.latent_attention(self.plan, layer, q, latents, keys, up)
