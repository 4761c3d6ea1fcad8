"""How far each process of a worker has got, where it has several."""

from collections.abc import Sequence
from typing import NamedTuple


class RankProgress(NamedTuple):
    """sums: that it has entered; 0 on a GPU, where kernels count them. messages: of the leader that it has done with,
    or written as the leader."""

    pid: int
    sums: int
    messages: int


def stalled_ranks(before: Sequence[RankProgress], after: Sequence[RankProgress]) -> set[int]:
    """The ranks for which a worker waits that answered nothing between these two looks: those that are behind the
    others and got no further. The leader, 0, where nobody is behind."""
    least, most = min(one[1:] for one in after), max(one[1:] for one in after)
    if least == most:
        return {0}
    both = enumerate(zip(before, after, strict=True))
    return {rank for rank, (old, new) in both if new[1:] == least == old[1:]}
