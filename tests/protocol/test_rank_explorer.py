"""A leader and its followers, whatever the order of calls, reads, signals and losses."""

from collections.abc import Callable

import pytest

from tandem.workers.engine.engine import Engine
from tandem.workers.following.leader import Leader, LeadingEngine
from tandem.workers.ranks.rank_memory import CallWriter
from tests.protocol.rank_world import explore_ranks, walk

WALKS = 60


@pytest.mark.parametrize("num_losses", [0, 1, 2])
def test_nothing_goes_wrong_on_random_ways(num_losses: int) -> None:
    assert not [found for seed in range(WALKS) if (found := walk(seed, num_losses))]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_goes_wrong_in_any_order() -> None:
    explored = explore_ranks(1, 10_000)
    assert explored.finding is None, str(explored.finding)
    assert explored.complete


def pages_are_offered_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "wait_for_all", lambda self, *_: None)


def signals_count_at_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeadingEngine, "mailbox", Engine.mailbox)


def marks_count_at_the_leader(patch: pytest.MonkeyPatch) -> None:
    mark = LeadingEngine.mark

    def marked(self: LeadingEngine) -> Callable[[], bool] | None:
        mark(self)
        return self._runner.marks[-1].is_quiet  # type: ignore[attr-defined]

    patch.setattr(LeadingEngine, "mark", marked)


def fences_count_at_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tandem.workers.following.leader._RanksFence.is_quiet", lambda self: self._own.is_quiet())


def a_full_ring_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallWriter, "_room", lambda self: self._ring.size)


def sums_are_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tandem.workers.following.leader.end_waits", lambda memory: None)


PROTECTIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "pages are offered once all ranks have them": (pages_are_offered_at_once, "has not set aside"),
    "signals are there on each rank": (signals_count_at_the_leader, "a signal counts"),
    "marks are past on each rank": (marks_count_at_the_leader, "a mark counts"),
    "fences are quiet on each rank": (fences_count_at_the_leader, "a fence counts"),
    "a full ring is waited for": (a_full_ring_is_written, "rank"),
    "a loss ends all waits": (sums_are_waited_for_without_end, "may wait for it in a sum"),
}


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_each_protection_is_needed(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, expected = PROTECTIONS[protection]
    patch(monkeypatch)
    found = next(found for seed in range(500) if (found := walk(seed, num_losses=seed % 2)))
    assert expected in found
