"""How a decoder reaches the cache."""

from collections.abc import Callable

from torch import Tensor

from tandem.cache.head_norm import HeadNorm
from tandem.workers.models.config import ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, HeadNorm | None], Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], sinks [Hq] or None, norm or None) -> o [T, Hq, D].

Norms heads of q and k, rotates, keeps K and V, and attends.
"""


def split_heads(config: ModelConfig, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] of qkv [T, (Hq + 2·Hkv)·D]; views, rows of one stride."""
    heads = qkv.view(qkv.shape[0], -1, config.head_dim)
    q, k, v = heads.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
    return q, k, v
