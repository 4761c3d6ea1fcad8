"""Pairs of a token and an expert, sorted into blocks of one expert each, for products over many experts at once.

The layout follows the padded blocks of MegaBlocks (Gale et al., 2022): an expert's last block may have empty rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear


@dataclass(frozen=True, eq=False)
class ExpertBlocks:
    """Pair p is token p // top_k with the p % top_k-th of its experts. The number of blocks is a bound."""

    pairs: Tensor  # int32 [blocks, rows]; num_pairs where a row is empty
    experts: Tensor  # int32 [blocks]; the number of experts for a block that is not needed
    num_pairs: int


GroupedLinear = Callable[[Tensor, Linear, ExpertBlocks, Tensor | None, int], Tensor]
"""(x [num_pairs / fan_out, K], weight [E, N, K] and bias [E, N], blocks, scale [num_pairs] or None, fan_out) -> y.

y [num_pairs, N], of x's dtype: y[p] = scale[p] · (weight[e] · x[p // fan_out] + bias[e]), e being the expert of pair p.
It is accumulated and scaled in float32, the dtype of scale. The strides of weight may be any.
Triton's also takes a ScaledLinear.
"""


def expert_blocks(experts: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    """Blocks of `rows` pairs of experts int64 [T, top_k]; within an expert, pairs keep their order.

    Reads nothing on the host: the number of blocks follows from the shape.
    """
    chosen = experts.flatten()
    num_pairs, device = chosen.shape[0], chosen.device
    bound = block_bound(num_pairs, num_experts, rows)
    order = chosen.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device).scatter_add_(0, chosen, torch.ones_like(chosen))
    blocks = (counts + rows - 1) // rows
    block_ends = blocks.cumsum(0)
    # Where an expert's pairs begin in the blocks, less where they begin among the sorted pairs.
    shift = (block_ends - blocks) * rows - (counts.cumsum(0) - counts)
    indices = torch.arange(num_pairs, device=device) + shift[chosen[order]]
    pairs = torch.full((bound * rows,), num_pairs, dtype=torch.int32, device=device)
    pairs.scatter_(0, indices, order.int())
    owners = torch.searchsorted(block_ends, torch.arange(bound, device=device), right=True, out_int32=True)
    return ExpertBlocks(pairs.view(bound, rows), owners, num_pairs)


def block_bound(num_pairs: int, num_experts: int, rows: int) -> int:
    """Returns the most blocks of `rows` pairs that may be needed."""
    return min(num_pairs, num_experts) + num_pairs // rows


def block_rows(num_pairs: int, num_experts: int) -> int:
    """About what an expert gets of evenly spread pairs, 16 (a tensor core's least) to 128."""
    each = num_pairs // num_experts
    return 16 if each <= 16 else 32 if each <= 32 else 64 if each <= 128 else 128
