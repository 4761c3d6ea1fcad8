"""Adaptive roles at the gateway: prompts computed where they are decoded, and requests that move, with fake workers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.worker_link import WorkerAddress, WorkerLink
from tandem.proto import worker_pb2
from tandem.workers.config import Role
from tests.cluster.fake_worker import FakeWorker
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of
from tests.support.gateways import settings_of

ADAPTIVE = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.015}
PROMPT = [5, 6, 7]
TOKENS = [(number * 7 + 3) % 100 for number in range(64)]
BUSY = worker_pb2.WorkerReport(prompt_tokens=50_000, prompt_tokens_per_second=10_000)
IDLE = worker_pb2.WorkerReport(prompt_tokens_per_second=10_000)
SLOW = worker_pb2.WorkerReport(rows=20, token_seconds=0.03, prompt_tokens_per_second=10_000)

Body = Callable[[Gateway, AsyncClient, FakeWorker, FakeWorker], Awaitable[None]]


def say(sequence: list[int]) -> int:
    return TOKENS[len(sequence) - len(PROMPT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("adaptive"))


def link(gateway: Gateway, pe: int) -> WorkerLink:
    return gateway._islands.links()["i", pe]


def with_gateway(model: Path, body: Body, **options: object) -> None:
    """Runs body beside a gateway with a prefill worker, PE 0, and a decode worker, PE 1."""
    config = load_config(None, {"model.path": str(model), "gateway.port": 0, **ADAPTIVE, **options})

    async def run() -> None:
        prefill, decode = FakeWorker(say, pe=0, feeds=True), FakeWorker(say, pe=1, feeds=True)
        await asyncio.gather(prefill.start(), decode.start())
        gateway = Gateway(settings_of(config, 256, num_pages=64))
        addresses = await gateway.start()
        workers = tuple(
            WorkerAddress(role, pe, worker.address, "")
            for pe, (role, worker) in enumerate([(Role.PREFILL, prefill), (Role.DECODE, decode)])
        )
        await gateway.update_island(IslandState("i", 1, 0, workers, 1))
        try:
            async with AsyncClient(addresses.grpc) as client:
                await body(gateway, client, prefill, decode)
        finally:
            await gateway.stop(0.1)
            await asyncio.gather(prefill.stop(), decode.stop())

    asyncio.run(run())


async def ask(client: AsyncClient, num_tokens: int = 8, **sampling: object) -> list[GenerateUpdate]:
    stream = client.generate(PROMPT, timeout=20, max_tokens=num_tokens, temperature=0, **sampling)  # type: ignore[arg-type]
    return [update async for update in stream]


def test_prompts_go_to_the_prefill_worker_while_it_has_time(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, prefill: FakeWorker, decode: FakeWorker) -> None:
        link(gateway, 0).report = IDLE
        link(gateway, 1).report = worker_pb2.WorkerReport(rows=20, token_seconds=0.008)
        updates = await ask(client)
        assert tokens_of(updates) == TOKENS[:8]
        assert len(prefill.sent) == 1
        assert not decode.local
        assert updates[-1].timings is not None
        assert updates[-1].timings.expected_first_token_seconds == pytest.approx(len(PROMPT) / 10_000)

    with_gateway(model, body)


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 0}, {"stop": ["never said"]}])
@pytest.mark.parametrize("num_tokens", [1, 2, 8])
def test_a_decode_worker_computes_prompts_while_the_prefill_worker_is_busy(
    model: Path, num_tokens: int, sampling: dict[str, object]
) -> None:
    async def body(gateway: Gateway, client: AsyncClient, prefill: FakeWorker, decode: FakeWorker) -> None:
        link(gateway, 0).report = BUSY
        asked = {} if "stop" in sampling else sampling
        assert tokens_of(await ask(client, num_tokens, **asked)) == TOKENS[:num_tokens]
        updates = await ask(client, num_tokens, **asked)  # this one has a feed
        assert tokens_of(updates) == TOKENS[:num_tokens]
        assert len(decode.local) == 2
        assert not prefill.sent
        last = updates[-1]
        assert last.timings is not None
        assert last.timings.prefill_seconds == 1.0
        assert 0 < last.timings.first_token_seconds <= last.timings.total_seconds
        assert not link(gateway, 1).has_prompts

    with_gateway(model, body)


def test_a_request_moves_to_the_faster_worker_and_loses_no_token(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, prefill: FakeWorker, decode: FakeWorker) -> None:
        link(gateway, 0).report = IDLE
        decode.step_seconds = 0.05
        updates = []
        async for update in client.generate(PROMPT, timeout=20, max_tokens=60, temperature=0):
            updates.append(update)
            if len(updates) == 4:
                link(gateway, 1).report = SLOW
        assert tokens_of(updates) == TOKENS[:60]
        last = updates[-1]
        assert last.timings is not None
        assert (last.timings.moves, last.timings.attempts) == (1, 1)
        (computed,) = decode.prompts  # by the worker that has its KV
        assert computed == PROMPT + TOKENS[: len(computed) - len(PROMPT)]
        assert len(computed) >= len(PROMPT) + 4
        assert prefill.prompts == [PROMPT]

    with_gateway(model, body)
