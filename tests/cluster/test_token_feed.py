"""Tokens that come over a worker's feed, and those that do not, in one order; and turns in which they are written."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.cluster.token_inbox import FeedLost, TokenInbox
from tandem.cluster.turns import Turns
from tandem.proto.worker_pb2 import GeneratedTokens


async def next_of(inbox: TokenInbox) -> list[int]:
    await inbox.ready()
    return list(inbox.next().token_ids)


async def call_of(*messages: GeneratedTokens) -> AsyncIterator[GeneratedTokens]:
    for message in messages:
        yield message


def test_a_message_waits_for_what_was_fed_before_it() -> None:
    async def run() -> None:
        inbox = TokenInbox(7, 1)
        await inbox.read(call_of(GeneratedTokens(token_ids=[5], finish_reason=2, fed=3)))  # type: ignore[arg-type]
        inbox.add(1)
        assert await next_of(inbox) == [1]
        waiting = asyncio.ensure_future(next_of(inbox))
        await asyncio.sleep(0)
        inbox.add(2)
        assert await waiting == [2]
        inbox.add(3)
        inbox.lose(FeedLost())  # not of this request: all of it has come
        assert await next_of(inbox) == [3]
        assert await next_of(inbox) == [5]

    asyncio.run(run())


def test_a_reader_that_is_slow_gets_what_has_gathered() -> None:
    async def run() -> None:
        inbox = TokenInbox(7, 1)
        for token in range(5):
            inbox.add(token)
        assert await next_of(inbox) == list(range(5))
        inbox.lose(FeedLost("gone"))
        with pytest.raises(FeedLost, match="gone"):
            await next_of(inbox)

    asyncio.run(run())


def test_a_call_that_ends_early_is_an_end() -> None:
    async def run() -> None:
        inbox = TokenInbox()
        await inbox.read(call_of(GeneratedTokens(token_ids=[1])))
        assert await next_of(inbox) == [1]
        with pytest.raises(EOFError):
            await next_of(inbox)

    asyncio.run(run())


def test_turns_go_round_by_round_in_order() -> None:
    async def run() -> None:
        turns, rounds, taken = Turns(3), 0, list[tuple[int, int]]()

        async def take(number: int) -> None:
            await turns.take()
            taken.append((rounds, number))

        tasks = [asyncio.ensure_future(take(number)) for number in range(8)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        while not all(task.done() for task in tasks):
            rounds += 1
            await asyncio.sleep(0)
        assert [number for _, number in taken] == [0, 1, 2, 3, 5, 6, 7]
        by_round = [[number for at, number in taken if at == round_] for round_ in sorted({at for at, _ in taken})]
        assert max(map(len, by_round)) == 3
        await turns.take()  # at once: nobody has taken one since

    asyncio.run(run())
