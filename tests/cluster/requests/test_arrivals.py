"""Tokens of a feed that the event loop passes on, and when a request's task has to see to them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tandem.cluster.errors import PlacementLost
from tandem.cluster.requests.arrivals import Arrivals, Begun
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.proto.worker_pb2 import GeneratedTokens

A_ROUND = 2


class Reader:
    """A request's task. Its client gets tokens, and does not read while `stalled` is set."""

    def __init__(self, turns: FairTurns) -> None:
        self.inbox = TokenInbox(7, 1)
        self._arrivals = Arrivals(self.inbox, turns, 1)
        self.got: list[list[int]] = []
        self.looked = 0  # how often the task went on
        self.stalled: asyncio.Future[None] | None = None
        self.last = -1  # ends the request
        self.task = asyncio.ensure_future(self._run())

    async def _take(self, token_ids: list[int]) -> bool:
        if self.stalled is not None:
            await self.stalled
        self.got.append(token_ids)
        return self.last not in token_ids

    async def _run(self) -> list[int]:
        while True:
            tokens = await self._arrivals.next(self._take)
            self.looked += 1
            if tokens is not None:
                return list(tokens.token_ids)
            if self.last in self.got[-1]:
                return []


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def with_reader(body: Callable[[Reader], Awaitable[None]]) -> None:
    async def run() -> None:
        reader = Reader(FairTurns(A_ROUND))
        await rounds(1)
        await body(reader)

    asyncio.run(run())


def test_no_task_wakes_for_tokens_of_a_feed() -> None:
    async def body(reader: Reader) -> None:
        for token in range(5):
            reader.inbox.add(token)
            await rounds(3)
        assert (reader.got, reader.looked) == ([[0], [1], [2], [3], [4]], 0)
        reader.inbox.end(PlacementLost("the call"))
        with pytest.raises(PlacementLost, match="the call"):
            await reader.task

    with_reader(body)


def test_tokens_of_one_message_stay_together_and_the_last_message_comes_behind_them() -> None:
    async def messages() -> AsyncIterator[GeneratedTokens]:
        yield GeneratedTokens(token_ids=[9], finish_reason=2, fed=3)  # type: ignore[arg-type]

    async def body(reader: Reader) -> None:
        await reader.inbox.read(messages())
        for token in range(3):
            reader.inbox.add(token)
        assert await asyncio.wait_for(reader.task, 10) == [9]
        assert reader.got == [[0, 1, 2]]

    with_reader(body)


def test_a_client_that_does_not_read_gets_all_tokens_in_order_later() -> None:
    async def body(reader: Reader) -> None:
        reader.stalled = asyncio.get_running_loop().create_future()
        for token in range(4):
            reader.inbox.add(token)
            await rounds(3)
        assert (reader.got, reader.looked) == ([], 0)
        stalled, reader.stalled = reader.stalled, None
        stalled.set_result(None)
        await rounds(5)
        assert (reader.got, reader.looked) == ([[0], [1, 2, 3]], 1)
        reader.task.cancel()

    with_reader(body)


def test_a_stop_string_ends_the_request_without_another_token() -> None:
    async def body(reader: Reader) -> None:
        reader.last = 1
        reader.inbox.add(0)
        await rounds(3)
        reader.inbox.add(1)
        assert await asyncio.wait_for(reader.task, 10) == []
        assert reader.got == [[0], [1]]

    with_reader(body)


def test_what_fails_while_tokens_are_passed_on_ends_the_task_and_no_other() -> None:
    async def run() -> None:
        turns = FairTurns(A_ROUND)
        failing, other = Reader(turns), Reader(turns)

        async def fail(token_ids: list[int]) -> bool:
            raise ValueError(f"of {token_ids}")

        failing._take = fail  # type: ignore[method-assign]
        await rounds(1)
        for reader in (failing, other):
            reader.inbox.add(5)
        with pytest.raises(ValueError, match=r"of \[5\]"):
            await asyncio.wait_for(failing.task, 10)
        await rounds(3)
        assert other.got == [[5]]
        other.task.cancel()

    asyncio.run(run())


def test_a_request_that_is_cancelled_gets_no_token() -> None:
    async def body(reader: Reader) -> None:
        reader.inbox.add(0)
        reader.task.cancel()
        await rounds(5)
        assert reader.task.cancelled()
        assert reader.got == []

    with_reader(body)


def test_rounds_bound_how_many_are_passed_on() -> None:
    async def run() -> None:
        turns = FairTurns(A_ROUND)
        readers = [Reader(turns) for _ in range(5)]
        await rounds(1)
        for reader in readers:
            reader.inbox.add(1)
        counts = []
        while sum(counts) < 5:
            await rounds(1)
            counts.append(sum(len(reader.got) for reader in readers) - sum(counts))
        assert [count for count in counts if count] == [2, 2, 1]
        for reader in readers:
            reader.task.cancel()

    asyncio.run(run())


def test_a_begun_coroutine_hears_of_its_tasks_end() -> None:
    async def run() -> None:
        ended = list[str]()

        async def work() -> None:
            try:
                await asyncio.sleep(0)
                await asyncio.sleep(60)
            finally:
                ended.append("work")

        async def finish() -> None:
            await Begun(work())

        task = asyncio.ensure_future(finish())
        await rounds(3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended == ["work"]

    asyncio.run(run())


def test_a_request_that_ends_while_its_tokens_are_passed_on_leaves_others_their_turns() -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns = FairTurns(A_ROUND)
        first, second = Reader(turns), Reader(turns)

        async def cancels(token_ids: list[int]) -> bool:
            return not first.task.cancel()

        first._take = cancels  # type: ignore[method-assign]
        await rounds(1)
        first.inbox.add(0)
        await rounds(3)
        assert first.task.cancelled()
        second.inbox.add(1)
        await rounds(3)
        assert second.got == [[1]]
        second.task.cancel()

    asyncio.run(run())
