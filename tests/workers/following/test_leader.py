"""Checks what a leader sends its followers, and what happens to a follower that gets another result."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.transport import QuietFence, Transport
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import RankLost
from tandem.workers.following.calls import FENCE, MARK
from tandem.workers.following.follower import Follower
from tandem.workers.following.leader import Leader
from tandem.workers.ranks.rank_memory import DONE, LOST, RankMemory, create_memory
from tandem.workers.ranks.rank_memory import MARK as MARKS
from tandem.workers.ranks.shared_ranks import LATE, failure_word
from tandem.workers.sampling.prompt_logits import PromptLogits
from tests.support.waiting import until

ROWS, WORKERS = 4, 2


class Pages(NamedTuple):
    free: int


class FakeEngine:
    """Two actions by the names of an engine's: received() makes a handle, free() takes it and gives pages back."""

    def __init__(self) -> None:
        self.free_pages, self.freed = 9, list[object]()
        self.made: PromptLogits | None = None
        self.first_adapter_read: tuple[int, bytes] | None = None

    @property
    def pages(self) -> Pages:
        return Pages(self.free_pages)

    def tend(self) -> None:
        pass

    def received(self, sequence: int) -> PromptLogits:
        self.made = PromptLogits(sequence, torch.empty(0))
        return self.made

    def free(self, sequence: object) -> None:
        if self.free_pages == 0:
            raise InvalidArgument("none")
        self.freed.append(sequence)
        self.free_pages -= 1

    def mark(self, *, copies: bool = False) -> Callable[[], bool] | None:
        assert copies, "a peer may write once a follower's copies are past, too"
        return lambda: bool(self.freed)

    def fence(self, pe: int) -> QuietFence:
        return QuietFence()


class FakeTransport:
    num_pes = WORKERS

    def mailbox(self) -> np.ndarray[Any, Any]:
        return np.full((ROWS, 2), 7, np.int64)


class Pair:
    """A leader and one follower, each with an engine."""

    def __init__(self) -> None:
        self.memory: RankMemory = create_memory(2, WORKERS, ROWS, 1 << 16)[0]
        self.leader, self.lead, self.follow = Leader(self.memory), FakeEngine(), FakeEngine()
        transport = cast(Transport, FakeTransport())
        self.follower = Follower(cast(Engine, self.follow), transport, self.memory, 1)

    def act(self, name: str, argument: object) -> Any:
        """Acts at the leader, then at the follower."""
        try:
            return self.lead_alone(name, argument)
        finally:
            self.follower.step()

    def lead_alone(self, name: str, argument: object) -> Any:
        action = lambda engine, *arguments: getattr(engine, name)(*arguments)  # noqa: E731
        return self.leader.act(cast(Engine, self.lead), name, (argument,), action)


def test_a_handle_names_what_the_follower_itself_has_made() -> None:
    pair = Pair()
    made = pair.act("received", 5)
    pair.act("free", made)
    assert pair.lead.freed == [pair.lead.made]
    assert pair.follow.freed == [pair.follow.made]
    assert pair.follow.made is not pair.lead.made
    assert not pair.follower.lost


def test_an_error_that_both_have_ends_nothing() -> None:
    pair = Pair()
    pair.lead.free_pages = pair.follow.free_pages = 0
    with pytest.raises(InvalidArgument):
        pair.act("free", 1)
    pair.act("received", 2)
    assert not pair.follower.lost


def test_a_follower_with_other_pages_ends_the_worker() -> None:
    pair = Pair()
    pair.follow.free_pages = 8
    pair.act("free", 1)
    assert "an action left 7 free pages" in pair.follower.lost
    assert "at the leader 8" in pair.follower.lost
    assert pair.memory.states[1].get(LOST)
    assert pair.memory.sums[0] == 1, "nobody waits for it in a sum"
    with pytest.raises(RankLost, match="rank 1 cannot continue"):
        pair.act("free", 2)
    with pytest.raises(RankLost):
        pair.leader.wait_for_all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_gave_up_ends_the_worker(rank: int) -> None:
    """Its next call fails, in whatever way: that is no error of a request."""
    pair = Pair()
    pair.memory.sums[failure_word(rank)] = LATE
    (pair.lead if rank == 0 else pair.follow).free_pages = 0
    if rank == 0:
        with pytest.raises(RankLost, match="rank 0 waited for the others in vain"):
            pair.act("free", 1)
        assert pair.leader.lost
    else:
        pair.act("free", 1)
        assert pair.follower.lost == "rank 1 waited for the others in vain"
    assert pair.memory.sums[0] == 1, "nobody waits for it in a sum"
    with pytest.raises(RankLost):
        pair.act("free", 2)


def test_a_follower_whose_thread_has_ended_makes_the_calls_up_to_the_last() -> None:
    pair = Pair()
    for sequence in range(3):
        pair.leader.act(cast(Engine, pair.lead), "free", (sequence,), lambda engine, one: engine.free(one))
    pair.leader.close()
    pair.follower.finish(5.0)
    assert pair.follow.freed == [0, 1, 2]
    assert not pair.follower.lost


def test_an_error_of_the_follower_alone_ends_the_worker() -> None:
    pair = Pair()
    pair.lead.free_pages, pair.follow.free_pages = 1, 0
    pair.act("free", 1)
    assert "and raised InvalidArgument; at the leader 0, 0 and nothing" in pair.follower.lost


def test_an_error_of_the_leader_alone_ends_the_worker_before_its_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower waits for the leader in a sum of the forward that failed there."""
    monkeypatch.setattr("tandem.workers.following.leader.AGREE_SECONDS", 0.1)
    pair = Pair()
    pair.lead.free_pages = 0
    with pytest.raises(InvalidArgument):
        pair.lead_alone("free", 1)
    with pytest.raises(RankLost, match=r"a rank has not had the leader's error, for 0.1 s"):
        pair.leader.tell(MARK)
    assert pair.memory.sums[0] == 1, "the follower's wait ends"


def test_a_follower_does_not_wait_long_for_the_leader_to_have_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader waits for it in a sum of the forward that failed here."""
    monkeypatch.setattr("tandem.workers.following.calls.AGREE_SECONDS", 0.1)
    pair = Pair()
    pair.follow.free_pages = 0
    pair.leader.tell("free", (1,))
    until(lambda: (pair.follower.step(), pair.follower.lost)[1])
    assert "InvalidArgument was raised here, and the leader has not had it" in pair.follower.lost
    assert pair.memory.sums[0] == 1, "the leader's wait ends"


def test_polls_count_at_the_follower_once_they_are_so() -> None:
    pair = Pair()
    state = pair.memory.states[1]
    pair.leader.tell(MARK)
    pair.leader.tell(FENCE, (1,))
    pair.follower.step()
    assert (state.get(MARKS), state.fences.tolist(), state.signals.tolist()) == (0, [0, 1], [7] * ROWS)
    pair.act("free", 1)
    assert state.get(MARKS) == 1
    assert state.get(DONE) == 4, "two polls, an action and how it ended"
    pair.leader.wait_for_all()
