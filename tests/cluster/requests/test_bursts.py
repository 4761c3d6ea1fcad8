"""Thousands of calls at once: each is served or refused with an advice, and the client library sends it again."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.errors import Overloaded
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY
from tandem.cluster.peers import peer_server
from tandem.cluster.protocol import build_request
from tandem.proto import inference_pb2
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.ports.connections import lenient_options
from tandem.workers.service.server_options import server_options
from tests.cluster.open_gateway import PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of
from tests.support.waiting import until

BURST = 3000
MAX_CALLS = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("bursts"))


@contextmanager
def standing_still(opened: OpenGateway) -> Iterator[None]:
    """The gateway's event loop does nothing inside the block: calls pile up before it."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait(60)

    opened.events._loop.call_soon_threadsafe(stand)
    assert stands.wait(60)
    try:
        yield
    finally:
        goes_on.set()


def test_each_call_of_a_burst_is_served_or_told_when_to_come_again(model: Path) -> None:
    """gRPC itself would cancel some of more than 1,000 unanswered calls, and all of more than 3,000."""
    request = build_request(PROMPT, {"max_tokens": 1}, None)
    with (
        open_gateway(model, {"gateway.max_calls": MAX_CALLS}, alone=True) as opened,
        grpc.insecure_channel(opened.grpc) as channel,
    ):
        grpc.channel_ready_future(channel).result(60)
        method: Any = channel.unary_unary(  # one token is one message
            "/tandem.v1.Inference/Generate", inference_pb2.GenerateRequest.SerializeToString
        )
        with standing_still(opened):
            calls = [method.future(request, timeout=60) for _ in range(BURST)]
        until(lambda: sum(call.done() for call in calls) >= BURST - MAX_CALLS)
        opened.island_comes()
        outcomes = Counter(call.code() for call in calls)
        advised = [call for call in calls if RETRY_AFTER_KEY in dict(call.trailing_metadata() or ())]
    assert set(outcomes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, outcomes
    assert outcomes[grpc.StatusCode.OK] == MAX_CALLS
    assert len(advised) == BURST - MAX_CALLS


def test_all_of_a_burst_are_served_in_the_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client library sends refused requests again."""

    async def all_at_once(address: str, number: int) -> list[list[int]]:
        async def one(client: AsyncClient) -> list[int]:
            updates = client.generate(PROMPT, max_tokens=len(TOKENS), timeout=60)
            return tokens_of([update async for update in updates])

        async with AsyncClient(address) as client:
            return await asyncio.gather(*(one(client) for _ in range(number)))

    with open_gateway(model, {"gateway.max_calls": 40}, alone=True) as opened, ThreadPoolExecutor(1) as pool:
        asked, admit = list[None](), opened.gateway._limit.admit
        monkeypatch.setattr(opened.gateway._limit, "admit", lambda: (asked.append(None), admit()))
        answers = pool.submit(asyncio.run, all_at_once(opened.grpc, 200))
        until(lambda: len(asked) > 40)
        opened.island_comes()
        assert answers.result(120) == [TOKENS] * 200


def test_who_sends_most_is_turned_away_and_not_others(model: Path) -> None:
    async def run(opened: OpenGateway) -> None:
        async with (
            AsyncClient(opened.grpc, client_id="much", resume_seconds=0) as much,
            AsyncClient(opened.grpc, client_id="little", resume_seconds=0) as little,
        ):
            many = [asyncio.ensure_future(anext(much.generate(PROMPT, max_tokens=1))) for _ in range(30)]
            await asyncio.to_thread(
                until, lambda: opened.gateway._router.queued == 20 and sum(map(_is_over, many)) == 10
            )
            few = [asyncio.ensure_future(anext(little.generate(PROMPT, max_tokens=1))) for _ in range(5)]
            await asyncio.to_thread(until, lambda: sum(map(_is_over, many)) == 15)
            await asyncio.to_thread(opened.island_comes)
            await asyncio.gather(*few)
            refused = [error for error in await asyncio.gather(*many, return_exceptions=True) if _is_error(error)]
            assert len(refused) == 15
            assert all(isinstance(error, Overloaded) for error in refused), refused

    with open_gateway(model, {"gateway.max_queued": 20}, alone=True) as opened:
        asyncio.run(run(opened))


def _is_over(call: "asyncio.Future[Any]") -> bool:
    return call.done()


def _is_error(outcome: object) -> bool:
    return isinstance(outcome, BaseException)


def test_other_servers_take_bursts_and_pings_too_and_no_silence() -> None:
    """A gateway sends its workers and its peers as much as its clients send it."""
    config = WorkerConfig(
        role=Role.DECODE, island="i", epoch=1, pe=0, num_pes=1, model_path="", max_model_len=64, token="t"
    )
    for options in (peer_server.OPTIONS, server_options(config)):
        assert set(lenient_options()) <= set(options)
    for name in ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms"):
        assert dict(server_options(config))[f"grpc.{name}"] == 500 * config.lease_seconds
