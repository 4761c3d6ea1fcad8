"""Processes of an island are numbered by worker, then by rank."""

import pytest

from tandem.transfer.island_ranks import IslandRanks


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2, 1), (1, 4, 2)])
def test_each_rank_has_the_next_process(sizes: tuple[int, ...]) -> None:
    ranks = IslandRanks(sizes)
    numbers = [ranks.process(pe, rank) for pe, size in enumerate(sizes) for rank in range(size)]
    assert numbers == list(range(ranks.processes))
    assert ranks.leaders == [ranks.process(pe) for pe in range(len(sizes))]
    assert ranks.has_several == (sizes not in ((1,), (1, 1)))
