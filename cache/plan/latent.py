"""Multi-head latent attention (DeepSeek-V2, 2024): a cache keeps one latent row a position, from which every head's K
and V are made.

K of a head is [made of the latent, key_dim | rotated, shared by the heads]; V is made of the latent. Attention can be
absorbed: queries are multiplied by K's map and meet the stored rows, and V's map follows the softmax. Or it can be
expanded: K and V are made first. Both give the same.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array

EXPANDED_POSITIONS = 1 << 18  # of which K and V are made in one forward; those of sequences beyond are absorbed
EXPANDED_ROWS = 1 << 20  # heads times positions of K and V that are in memory at once: 0.9 GiB of DeepSeek's in 16 bits


@dataclass(frozen=True)
class LatentHeads:
    """Sizes of a head: key_dim numbers of its K are made of the latent, and value_dim, its V."""

    key_dim: int
    value_dim: int


@dataclass(frozen=True, eq=False)
class UpProjections:
    """The maps from latents to one layer's K and V. weight: [num_heads, key_dim + value_dim, rank], K's rows first."""

    weight: Tensor
    heads: LatentHeads

    def absorb(self, q: Tensor) -> Tensor:
        """Returns [T, num_heads, rank]. Its product with a latent equals the product of q [T, num_heads, key_dim]
        with the latent's K."""
        return torch.bmm(q.transpose(0, 1), self.weight[:, : self.heads.key_dim]).transpose(0, 1)

    def values(self, weighted: Tensor) -> Tensor:
        """o [T, num_heads, value_dim] of weighted sums of latents, [T, num_heads, rank]."""
        output = weighted.new_empty((*weighted.shape[:2], self.heads.value_dim))
        maps = self.weight[:, self.heads.key_dim :].transpose(1, 2)
        torch.bmm(weighted.transpose(0, 1), maps, out=output.transpose(0, 1))
        return output

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """K without its rotated part [n, num_heads, key_dim], and V [n, num_heads, value_dim], of latents [n, rank]."""
        both = F.linear(latents, self.weight.flatten(0, 1)).unflatten(1, self.weight.shape[:2])
        k, v = both.split_with_sizes((self.heads.key_dim, self.heads.value_dim), 2)
        return k, v

    def keys_and_values(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Whole K [n, num_heads, key_dim + rotated] and V [n, num_heads, value_dim] of entries [n, rank + rotated]."""
        rank = self.weight.shape[2]
        made, values = self.expand(entries[:, :rank])
        return torch.cat((made, entries[:, None, rank:].expand(-1, made.shape[1], -1)), 2), values

    def of_heads(self, begin: int, end: int) -> "UpProjections":
        """Returns the projections of heads begin … end - 1."""
        return UpProjections(self.weight[begin:end], self.heads)


def absorbed_is_cheaper(
    appends: Int32Array, lengths: Int32Array, rank: int, rotated: int, heads: LatentHeads
) -> NDArray[np.bool_]:
    """Returns which sequences attend faster absorbed. appends, lengths: int32 [B], new tokens and all positions of
    each.

    Compares the multiplications of a head. Absorbed rows are wider than K and V (rank + rotated against key_dim +
    rotated, rank against value_dim). But K and V cost a product for each position, and absorbing costs one for each new
    token only. With DeepSeek's sizes the border is at some 170 new tokens of a long sequence.

    Single tokens are always absorbed: they wait for memory, and a latent row is the least there is to read. So are
    sequences that would raise the expanded positions above EXPANDED_POSITIONS, because those need memory of their own.
    """
    new, stored = appends.astype(np.int64), lengths.astype(np.int64)
    pairs, one_map = new * stored, rank * (heads.key_dim + heads.value_dim)
    absorbed = new * one_map + pairs * (2 * rank + rotated)
    expanded = stored * one_map + pairs * (heads.key_dim + rotated + heads.value_dim)
    cheaper = (new == 1) | (absorbed <= expanded)
    return cheaper | (np.cumsum(np.where(cheaper, 0, stored)) > EXPANDED_POSITIONS)


def heads_at_once(num_heads: int, num_positions: int) -> int:
    """Returns the number of heads whose K and V are made together: the largest divisor of num_heads that keeps to
    EXPANDED_ROWS, at least 1."""
    fits = (count for count in range(num_heads, 1, -1) if num_heads % count == 0)
    return next((count for count in fits if count * num_positions <= EXPANDED_ROWS), 1)
