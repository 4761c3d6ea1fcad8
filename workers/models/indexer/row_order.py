"""The order of a projection's rows whose numbers RoPE rotates. Rows of q and of K move alike, so scores stay."""

import torch
from torch import Tensor


def halves_first(rows: Tensor) -> None:
    """Rows 0, 1, 2, 3, … of each block become 0, 2, …, 1, 3, …; rows: [blocks, n, …], in place.

    Then halves are rotated in place of neighbours.
    """
    rows.copy_(torch.cat((rows[:, 0::2], rows[:, 1::2]), 1))


def last_first(rows: Tensor, count: int) -> None:
    """The first `count` rows of each block go after its others; rows: [blocks, n, …], in place."""
    rows.copy_(torch.cat((rows[:, count:], rows[:, :count]), 1))
