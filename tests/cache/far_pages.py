"""Pages after more elements of their pool than 32 bits can count. What is before them is never touched: it takes no
memory on a CPU."""

import torch
from torch import Tensor


def far_pages(near: Tensor) -> tuple[Tensor, int]:
    """A pool that ends in the pages of `near`, and the id of the first such page."""
    first = -(-(1 << 31) // near[0].numel())
    pool = torch.empty((first + near.shape[0], *near.shape[1:]), dtype=near.dtype, device=near.device)
    pool[first:] = near
    return pool, first
