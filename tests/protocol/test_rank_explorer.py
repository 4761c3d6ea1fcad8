"""A leader and its followers, whatever the order of calls, reads, signals and losses."""

from collections.abc import Callable

import pytest

from tandem.transfer.transport import Fence
from tandem.workers.engine.engine import Engine
from tandem.workers.following.leader import Leader, LeadingEngine
from tandem.workers.ranks.rank_memory import CallWriter
from tests.protocol.changing_peers import DroppingWires, RankWithPeers, WorldOfPeers
from tests.protocol.rank_world import RankWorld, explore_ranks, walk
from tests.protocol.small_island import PREFILL
from tests.protocol.wires import WireTransport

WALKS = 60
WORLDS: dict[str, type[RankWorld]] = {"ranks": RankWorld, "peers that change": WorldOfPeers}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("num_losses", [0, 1, 2])
def test_nothing_goes_wrong_on_random_ways(num_losses: int, world: str) -> None:
    assert not [found for seed in range(WALKS) if (found := walk(seed, num_losses, WORLDS[world]))]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_goes_wrong_in_any_order() -> None:
    explored = explore_ranks(1, 10_000)
    assert explored.finding is None, str(explored.finding)
    assert explored.complete


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_losses", [0, 1])
def test_nothing_goes_wrong_on_many_ways_while_a_peer_changes(num_losses: int) -> None:
    """There are too many orders to go through all."""
    ways = range(WALKS, 25 * WALKS)
    assert not [found for seed in ways if (found := walk(seed, num_losses, WorldOfPeers))]


def pages_are_offered_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "wait_for_all", lambda self, *_: None)


def signals_count_at_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeadingEngine, "mailbox", Engine.mailbox)


def marks_count_at_the_leader(patch: pytest.MonkeyPatch) -> None:
    mark = LeadingEngine.mark

    def marked(self: LeadingEngine, *, copies: bool = False) -> Callable[[], bool] | None:
        mark(self, copies=copies)
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


def peers_are_admitted_at_once(patch: pytest.MonkeyPatch) -> None:
    reach = RankWithPeers.reach

    def reach_and_admit(self: RankWithPeers) -> None:
        reach(self)
        if self.number:
            self.transport.admit(PREFILL)

    patch.setattr(RankWithPeers, "reach", reach_and_admit)
    patch.setattr(LeadingEngine, "welcome", Engine.welcome)


def nobody_admits_but_the_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeadingEngine, "welcome", Engine.welcome)


def writes_to_lost_peers_raise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DroppingWires, "write_slots", WireTransport.write_slots)


def fences_of_lost_peers_raise(patch: pytest.MonkeyPatch) -> None:
    def is_quiet(fence: Fence) -> bool:
        return fence.is_quiet()

    patch.setattr("tandem.workers.following.follower._is_quiet", is_quiet)


OF_PEERS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a peer is admitted in the order of calls": (peers_are_admitted_at_once, "what was for that peer"),
    "all ranks admit a peer": (nobody_admits_but_the_leader, "the successor gets"),
    "writes to a lost peer are dropped": (writes_to_lost_peers_raise, "PeerGone"),
    "fences of a lost peer wait for its end": (fences_of_lost_peers_raise, "cannot follow"),
}


@pytest.mark.parametrize("protection", OF_PEERS)
def test_each_protection_of_changing_peers_is_needed(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, expected = OF_PEERS[protection]
    patch(monkeypatch)
    found = next(found for seed in range(500) if (found := walk(seed, 0, WorldOfPeers)))
    assert expected in found


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_each_protection_is_needed(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, expected = PROTECTIONS[protection]
    patch(monkeypatch)
    found = next(found for seed in range(500) if (found := walk(seed, num_losses=seed % 2)))
    assert expected in found
