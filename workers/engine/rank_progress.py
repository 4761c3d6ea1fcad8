"""The progress of each process of a worker that has several."""

from collections.abc import Sequence
from typing import NamedTuple


class RankProgress(NamedTuple):
    """sums: sums over ranks that it has entered; 0 on a GPU, where kernels count them. messages: the leader's messages
    that it is done with, or that it wrote as the leader."""

    pid: int
    sums: int
    messages: int


def stalled_ranks(before: Sequence[RankProgress], after: Sequence[RankProgress]) -> set[int]:
    """Returns the ranks that a worker waits for: they are behind the others and got no further between the two looks.
    The leader, 0, if no rank is behind."""
    least, most = min(one[1:] for one in after), max(one[1:] for one in after)
    if least == most:
        return {0}
    both = enumerate(zip(before, after, strict=True))
    return {rank for rank, (old, new) in both if new[1:] == least == old[1:]}
