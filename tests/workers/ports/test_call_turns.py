"""Checks which call begins next, with connections that count what they pass on."""

import asyncio
from dataclasses import dataclass, field

import pytest

from tandem.workers.ports import call_turns
from tandem.workers.ports.allowance import Allowance
from tandem.workers.ports.call_turns import CALLS_AHEAD, CONNECTIONS_A_TURN, FRAMES_A_TURN, CallTurns, Rest

TURNS = 50


@dataclass(eq=False)
class Line:
    """A connection with so many calls, or frames that are no calls."""

    name: str
    begun: list[str]
    calls: int = 0
    frames: int = 0
    most: list[int] = field(default_factory=list)

    def pass_on(self, frames: int, calls: int) -> tuple[int, Rest]:
        self.most.append(frames)
        passed = min(calls, self.calls)
        self.calls -= passed
        self.frames -= min(frames, self.frames)
        self.begun += [self.name] * passed
        return passed, Rest.CALL if self.calls else Rest.FRAMES if self.frames else Rest.NOTHING


async def loop_turns(number: int = TURNS) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_no_more_calls_go_ahead_than_the_server_looks_at() -> None:
    async def run() -> None:
        turns, begun = CallTurns(), list[str]()
        turns.enter(Line("a", begun, calls=1000))
        await loop_turns()
        assert len(begun) == CALLS_AHEAD
        for looks in range(1, 100):
            turns.looked()
            await loop_turns(2)
            assert len(begun) == CALLS_AHEAD + looks

    asyncio.run(run())


def test_a_late_connection_does_not_wait_for_all_calls_of_others() -> None:
    async def run() -> None:
        turns, begun = CallTurns(), list[str]()
        for name in "abcd":
            turns.enter(Line(name, begun, calls=1000))
        await loop_turns()
        turns.enter(Line("late", begun, calls=1))
        for _ in range(8):
            turns.looked()
            await loop_turns(2)
        assert "late" in begun

    asyncio.run(run())


def test_frames_of_many_connections_do_not_keep_calls_waiting() -> None:
    async def run() -> None:
        turns, begun = CallTurns(), list[str]()
        for number in range(4 * CONNECTIONS_A_TURN):
            turns.enter(Line(str(number), begun, frames=1 << 20))
        turns.enter(busy := Line("call", begun, calls=1))
        await loop_turns(6)
        assert begun == ["call"]
        assert set(busy.most) == {FRAMES_A_TURN}

    asyncio.run(run())


def test_calls_that_the_server_never_sees_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers without a path, for example: gRPC answers them itself."""
    monkeypatch.setattr(call_turns, "LOST_SECONDS", 0.001)

    async def run() -> None:
        turns, begun = CallTurns(), list[str]()
        turns.enter(Line("lost", begun, calls=5 * CALLS_AHEAD))
        turns.enter(Line("honest", begun, calls=1))
        async with asyncio.timeout(10):
            while "honest" not in begun or len(begun) <= 5 * CALLS_AHEAD:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_connection_that_is_gone_is_not_asked() -> None:
    async def run() -> None:
        turns, begun = CallTurns(), list[str]()
        turns.enter(Line("first", begun, calls=CALLS_AHEAD))
        await loop_turns()
        turns.enter(gone := Line("gone", begun, calls=1))
        await loop_turns()
        turns.leave(gone)
        turns.looked()
        await loop_turns()
        assert "gone" not in begun

    asyncio.run(run())


def test_an_allowance_is_overdrawn_for_as_long_as_its_rate_takes() -> None:
    allowance = Allowance(rate=10.0, burst=100.0)
    assert allowance.spend(100, now=1000.0) == 0
    assert allowance.spend(5, now=1000.0) == 0.5
    assert allowance.spend(0, now=1000.5) == 0
    assert allowance.spend(10, now=1001.5) == 0
    assert allowance.spend(100, now=2000.0) == 0  # no more than the burst is left after a long time
    assert allowance.spend(10, now=2000.0) == 1.0
