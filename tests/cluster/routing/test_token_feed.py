"""Tokens that come over a worker's feed, and those that do not, in one order; and turns in which they are written."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.errors import PlacementLost
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.routing import token_feed
from tandem.cluster.routing.policy import Ask
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.proto.inference_pb2 import TokenLogprob, TokenLogprobs
from tandem.proto.worker_pb2 import GeneratedTokens
from tests.cluster.fake_worker import FakeWorker
from tests.cluster.requests.test_replay import PROMPT, TOKENS, ask, say, with_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of

MOST = 4


async def next_of(inbox: TokenInbox) -> list[int]:
    something = asyncio.Event()
    inbox.notify(something.set)
    await something.wait()
    return list(inbox.next(MOST).token_ids)


def test_a_long_message_comes_in_turns() -> None:
    async def run() -> None:
        inbox = TokenInbox()
        scored = [TokenLogprobs(chosen=TokenLogprob(token_id=token)) for token in range(6)]
        await inbox.read(call_of(GeneratedTokens(token_ids=range(6), logprobs=scored, finish_reason=2)))  # type: ignore[arg-type]
        first, last = inbox.next(MOST), inbox.next(MOST)
        assert [list(one.token_ids) for one in (first, last)] == [[0, 1, 2, 3], [4, 5]]
        assert [one.chosen.token_id for one in (*first.logprobs, *last.logprobs)] == list(range(6))
        assert (first.finish_reason, last.finish_reason) == (0, 2)

    asyncio.run(run())


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
        inbox.lose(PlacementLost())  # not of this request: all of it has come
        assert await next_of(inbox) == [3]
        assert await next_of(inbox) == [5]

    asyncio.run(run())


def test_a_reader_that_is_slow_gets_what_has_gathered() -> None:
    async def run() -> None:
        inbox = TokenInbox(7, 1)
        for token in range(6):
            inbox.add(token)
        assert await next_of(inbox) == [0, 1, 2, 3]  # in turns, with others
        assert await next_of(inbox) == [4, 5]
        inbox.lose(PlacementLost("gone"))
        with pytest.raises(PlacementLost, match="gone"):
            await next_of(inbox)

    asyncio.run(run())


def test_a_call_that_ends_early_is_an_end() -> None:
    async def run() -> None:
        inbox = TokenInbox()
        await inbox.read(call_of(GeneratedTokens(token_ids=[1])))
        inbox.end(PlacementLost("ended"))
        assert await next_of(inbox) == [1]
        with pytest.raises(PlacementLost, match="ended"):
            await next_of(inbox)

    asyncio.run(run())


def test_turns_go_round_by_round_in_order() -> None:
    async def run() -> None:
        turns, rounds, taken = FairTurns(3), 0, list[tuple[int, int]]()

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("feed"))


async def open_feed(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
    """Opens the worker's feed by a request that does without it."""
    assert tokens_of(await ask(client)) == TOKENS
    assert worker.fed == 0
    decode, *_ = next(gateway._islands.pairs(Ask(1, 1)))
    while decode.feed._current is None:
        await asyncio.sleep(0.01)


def test_tokens_come_over_the_feed_once_it_is_open(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await open_feed(gateway, client, worker)
        for answer in await asyncio.gather(*(ask(client) for _ in range(3))):
            assert tokens_of(answer) == TOKENS
        assert worker.fed == 3 * (len(TOKENS) - 2)  # without the first one and the last one
        decode, *_ = next(gateway._islands.pairs(Ask(1, 1)))
        assert not any(feed.inboxes for feed in decode.feed._feeds.values())

    with_gateway(model, FakeWorker(say, feeds=True), body)


def test_an_old_feed_ends_with_its_last_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_feed, "RENEW_SECONDS", 0.0)

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await open_feed(gateway, client, worker)
        decode, *_ = next(gateway._islands.pairs(Ask(1, 1)))
        for _ in range(3):
            (before,) = decode.feed._feeds
            answers = await asyncio.gather(*(ask(client) for _ in range(2)))
            assert [tokens_of(answer) for answer in answers] == [TOKENS] * 2
            while list(decode.feed._feeds) == [before] or len(decode.feed._feeds) > 1:
                await asyncio.sleep(0.01)
        assert worker.fed == 6 * (len(TOKENS) - 2)

    with_gateway(model, FakeWorker(say, feeds=True), body)


def test_a_feed_that_ends_loses_no_token(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await open_feed(gateway, client, worker)
        assert tokens_of(await ask(client)) == TOKENS
        assert worker.fed == len(TOKENS) - 2
        assert worker.prompts == [PROMPT, PROMPT, PROMPT + TOKENS[:1]]

    with_gateway(model, FakeWorker(say, {"Feed": ["UNAVAILABLE"]}, feeds=True), body)


def test_logprobs_outlast_a_feed(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await open_feed(gateway, client, worker)
        assert tokens_of(await ask(client, with_logprobs=True)) == TOKENS
        assert worker.fed == 0

    with_gateway(model, FakeWorker(say, feeds=True), body)
