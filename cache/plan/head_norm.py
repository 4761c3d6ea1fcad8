"""The norm that some models give each head of q and k before its rotation."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.cache.plan.rope import join_heads


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """Each head of q and k becomes itself / its root mean square · weight.

    weight: [Hq + Hkv, D], q's heads first. normalize: (heads [T, Hq + Hkv, D], weight, eps) -> the same, normed.
    """

    weight: Tensor
    eps: float
    normalize: Callable[[Tensor, Tensor, float], Tensor]

    def apply(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norms q [T, Hq, D] and k [T, Hkv, D]; both results are new."""
        both = self.normalize(join_heads(q, k), self.weight, self.eps)
        normed_q, normed_k = both.split_with_sizes((q.shape[1], k.shape[1]), 1)
        return normed_q, normed_k

    def apply_to_queries(self, q: Tensor) -> Tensor:
        """Norms q [T, Hq, D]; the result is new."""
        return self.normalize(q, self.weight[: q.shape[1]], self.eps)
