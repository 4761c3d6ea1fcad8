"""Several answers to one request: where they are placed, what they count as, and what one's failure does to others."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.gateway import Gateway
from tests.cluster.fake_worker import FakeWorker
from tests.cluster.requests.test_replay import PROMPT, TOKENS, model, say, with_gateway

__all__ = ["model"]  # a fixture


async def ask(client: AsyncClient, n: int) -> list[GenerateUpdate]:
    return [update async for update in client.generate(PROMPT, n=n, max_tokens=len(TOKENS), temperature=0, timeout=20)]


def tokens_by_index(updates: list[GenerateUpdate]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for update in updates:
        tokens.setdefault(update.index, []).extend(update.token_ids)
    return tokens


def test_others_wait_until_the_decode_worker_has_the_first_ones_kv(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        assert worker.landed is not None
        asked = asyncio.ensure_future(ask(client, 3))
        while not worker.sent:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(worker.sent) == 1
        worker.landed.set()
        assert tokens_by_index(await asked) == dict.fromkeys(range(3), TOKENS)
        assert len(worker.sent) == 3

    with_gateway(model, FakeWorker(say, landed=asyncio.Event()), body)


@pytest.mark.parametrize("status", ["UNAVAILABLE", "INTERNAL"])
def test_an_answer_that_loses_its_workers_is_placed_again(model: Path, status: str) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        updates = await ask(client, 3)
        assert tokens_by_index(updates) == dict.fromkeys(range(3), TOKENS)
        attempts = [update.timings.attempts for update in updates if update.timings]
        assert sorted(attempts) == [1, 1, 2]

    # The calls of the second and the third answer are interleaved.
    with_gateway(model, FakeWorker(say, {"StartGenerate": ["go on"] * 5 + [status]}), body)


def test_an_answer_that_fails_ends_the_call_and_frees_the_others(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        with pytest.raises(InvalidRequest, match="as the test says"):
            await ask(client, 3)
        async with asyncio.timeout(20):
            while Counter(worker.ended) != dict.fromkeys(worker.sent, 2):  # both workers of each
                await asyncio.sleep(0.01)
        assert gateway._requests.running == 0

    fake = FakeWorker(say, {"RemoteSend": ["go on", "go on", "INVALID_ARGUMENT"]}, step_seconds=0.2)
    with_gateway(model, fake, body)


def test_they_count_one_by_one_while_they_wait(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        asked = asyncio.ensure_future(ask(client, 5))
        async with asyncio.timeout(20):
            while (await client.cluster_info()).queued != 5:
                await asyncio.sleep(0.01)
            asked.cancel()
            while (await client.cluster_info()).queued:
                await asyncio.sleep(0.01)

    with_gateway(model, FakeWorker(say, {"PrepareReceive": ["RESOURCE_EXHAUSTED"] * 1000}), body)
