"""Several answers to one request: where they are placed, what they count as, and what one's failure does to others."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.requests.answers import Draft
from tandem.cluster.requests.fair_turns import FairTurns, cost_of, most_tokens
from tandem.cluster.requests.prompt_logprobs import PromptLogprobs
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.wire.prompt_spec import PromptSpec
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


@pytest.mark.parametrize("logprobs", [None, 20])
def test_the_best_answer_comes_in_bounded_messages(logprobs: int | None) -> None:
    async def drafted() -> Draft:
        draft = Draft(logprobs)
        for token in range(100):
            scored = inference_pb2.TokenLogprobs(chosen=inference_pb2.TokenLogprob(token_id=token, logprob=-1.0))
            last: Any = 2 if token == 99 else 0
            await draft.add(
                inference_pb2.GenerateResponse(
                    token_ids=[token], text=f"{token} ", logprobs=[scored], finish_reason=last
                )
            )
        return draft

    draft = asyncio.run(drafted())
    most = most_tokens(cost_of(logprobs))
    sizes = [len(message.token_ids) for message in draft.messages]
    assert sizes == [most] * (100 // most) + ([100 % most] if 100 % most else [])
    assert "".join(message.text for message in draft.messages) == "".join(f"{token} " for token in range(100))
    told = [one.chosen.token_id for message in draft.messages for one in message.logprobs]
    assert told == ([] if logprobs is None else list(range(100)))
    assert [message.finish_reason for message in draft.messages] == [0] * (len(sizes) - 1) + [2]
    assert draft.mean == -1.0


class Packed:
    """A call that brings 20 log-probabilities of each token but the first, in messages of so many tokens."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)
        self._begin = 1

    async def read(self) -> worker_pb2.PackedLogprobs | None:
        if not self._counts:
            return None
        own = np.arange(self._begin, self._begin + self._counts.pop(0), dtype="<f4")
        self._begin += len(own)
        ids, values = np.tile(np.arange(20, dtype="<u4"), len(own)), np.repeat(own, 20)
        return worker_pb2.PackedLogprobs(logprobs=own.tobytes(), top_ids=ids.tobytes(), top_logprobs=values.tobytes())


def test_log_probabilities_of_a_prompt_come_in_bounded_messages() -> None:
    request: Any = SimpleNamespace(
        request_id="r", prompt=PromptSpec(np.arange(100)), received=(), params=SimpleNamespace(prompt_logprobs=20)
    )

    async def read() -> list[inference_pb2.GenerateResponse]:
        scores = PromptLogprobs(request, FairTurns(16))
        lost: Any = Packed(40)  # its prompt fails after these
        again: Any = Packed(70, 29)
        messages = [message async for message in scores.messages(lost)]
        assert scores.wanted
        messages += [message async for message in scores.messages(again)]
        assert not scores.wanted
        return messages

    messages = asyncio.run(read())
    assert max(len(message.prompt_logprobs) for message in messages) == most_tokens(cost_of(20))
    first, *entries = [entry for message in messages for entry in message.prompt_logprobs]
    assert not first.HasField("chosen")
    assert [(entry.chosen.token_id, entry.chosen.logprob) for entry in entries] == [(one, one) for one in range(1, 100)]
    assert all([other.token_id for other in entry.top] == list(range(20)) for entry in entries)
    assert all({other.logprob for other in entry.top} == {entry.chosen.logprob} for entry in entries)
