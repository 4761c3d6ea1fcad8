"""Whose turn it is among those that wait, and how many may."""

import asyncio
from collections import OrderedDict, deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.errors import Overloaded
from tandem.cluster.routing.admission import AdmissionQueue


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Requests that wait for their turn and keep it until the test ends it."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self.queue = queue
        self.served: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def join(self, client: str, name: str, tokens: int = 1) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._wait(client, name, tokens))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def _wait(self, client: str, name: str, tokens: int) -> None:
        async with self.queue.turn(client, tokens):
            self.served.append(name)
            await self._ends[name].wait()


def naive_order(arrivals: list[tuple[str, str]]) -> list[str]:
    """The first arrival has the turn at once; then round robin over clients in the order of their first waiting
    request, the client that was just served last."""
    first, name = arrivals[0]
    order = [name]
    waiting: OrderedDict[str, deque[str]] = OrderedDict()
    for client, name in arrivals[1:]:
        waiting.setdefault(client, deque()).append(name)
    if next(iter(waiting), None) == first:
        waiting.move_to_end(first)
    while waiting:
        client, names = next(iter(waiting.items()))
        del waiting[client]
        order.append(names.popleft())
        if names:
            waiting[client] = names
    return order


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_clients_take_turns(clients: list[str]) -> None:
    async def run() -> list[str]:
        crowd = Crowd(AdmissionQueue(100, 100))
        arrivals = [(client, f"{client}{number}") for number, client in enumerate(clients)]
        for client, name in arrivals:
            await crowd.join(client, name)
        for _ in arrivals:
            await crowd.end(crowd.served[-1])
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)
        assert crowd.served == naive_order(arrivals)
        return crowd.served

    assert len(asyncio.run(run())) == len(clients)


def test_one_client_with_much_does_not_hold_up_another() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for number in range(10):
            await crowd.join("much", f"much{number}")
        await crowd.join("little", "little")
        await crowd.end("much0")
        assert crowd.served == ["much0", "little"]
        for task in crowd.tasks.values():
            task.cancel()

    asyncio.run(run())


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 5))
def test_who_goes_away_holds_up_nobody(leavers: list[int], ended: int) -> None:
    """Whether it waited, had just been given its turn, or had it."""

    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for number in range(6):
            await crowd.join("ab"[number % 2], str(number))
        crowd._ends[str(ended)].set()  # and without giving anybody time:
        for leaver in leavers:
            await crowd.cancel(str(leaver))
        for number in range(6):
            await crowd.end(str(number))
        for task in crowd.tasks.values():
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        assert {str(number) for number in range(6)} - set(map(str, leavers)) <= set(crowd.served)
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)

    asyncio.run(run())


def test_a_turn_given_to_one_that_was_cancelled_at_that_moment_goes_on() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(100, 100))
        for name in ("0", "1", "2"):
            await crowd.join("a", name)
        crowd._ends["0"].set()
        await asyncio.sleep(0)  # 0 passes its turn on to 1, which has not run yet
        crowd.tasks["1"].cancel()
        await settle()
        assert crowd.served == ["0", "2"]
        await crowd.end("2")
        assert (crowd.queue.requests, crowd.queue.tokens) == (0, 0)

    asyncio.run(run())


def test_bounds_name_their_key_and_say_when_to_come_again() -> None:
    async def run() -> None:
        crowd = Crowd(AdmissionQueue(2, 10))
        await crowd.join("a", "large", tokens=50)  # alone it may wait, whatever it asks for
        assert crowd.served == ["large"]
        with pytest.raises(Overloaded, match=r"50 tokens are queued .* asks for 1; gateway.max_queued_tokens is 10"):
            async with crowd.queue.turn("b", 1):
                pass
        await crowd.end("large")
        await crowd.join("a", "one")
        await crowd.join("a", "two")
        with pytest.raises(Overloaded, match=r"2 requests are queued; gateway.max_queued is 2") as caught:
            async with crowd.queue.turn("b", 1):
                pass
        assert 0.1 <= caught.value.retry_after_seconds < 60
        for task in crowd.tasks.values():
            task.cancel()

    asyncio.run(run())
