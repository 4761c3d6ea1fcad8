"""The priority of a request, from each frontend to its workers, and in the gateway's queue."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.routing import router
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.client_requests import complete, tokens_of
from tests.support.http_client import CHATS, COMPLETIONS, answer, post, refused
from tests.support.waiting import until

RANGE = {"gateway.priorities": [-3, 7]}
TEXTS: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "model": "model"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("priorities") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


@pytest.fixture
def gateway(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model, RANGE, say=lambda _: 5) as opened:
        yield opened


def over_http(gateway: OpenGateway, path: str, **fields: Any) -> int:
    """The priority that the decode worker heard of."""
    body = TEXTS.get(path, {"prompt": PROMPT, "max_tokens": 1})
    assert answer(gateway.http, path, **body, **fields)
    return gateway.worker.priorities[-1]


@pytest.mark.parametrize("path", [COMPLETIONS, *TEXTS])
def test_workers_hear_of_it_from_each_route(gateway: OpenGateway, path: str) -> None:
    assert over_http(gateway, path) == 0
    assert over_http(gateway, path, priority=4) == 4
    assert over_http(gateway, path, priority=-3, service_tier="flex") == -3
    assert over_http(gateway, path, service_tier="flex") == 7
    assert over_http(gateway, path, service_tier="priority") == -3
    assert over_http(gateway, path, service_tier="auto") == 0
    body = TEXTS.get(path, {"prompt": PROMPT})
    response = post(gateway.http, path, {**body, "priority": 8})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "priority is 8; it must be from -3 to 7 (gateway.priorities)"


def test_workers_hear_of_it_over_grpc(gateway: OpenGateway) -> None:
    assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=1, priority=2)) == [5]
    assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=2, n=2, priority=1, seed=1)) == [5] * 4
    assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=1, service_tier="flex")) == [5]
    assert gateway.worker.priorities == [2, 1, 1, 7]
    with pytest.raises(
        InvalidRequest, match=r"sampling.priority is -4; it must be from -3 to 7 \(gateway.priorities\)"
    ):
        complete(gateway.grpc, PROMPT, priority=-4)
    with pytest.raises(InvalidRequest, match=r"service_tier is 'flex'; leave it out when sampling\.priority is set"):
        complete(gateway.grpc, PROMPT, priority=1, service_tier="flex")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_workers_hear_of_it_from_prompts_that_are_read(model: Path, path: str) -> None:
    body: dict[str, Any] = {"input": PROMPT} if path == "/v1/embeddings" else {"text_1": "x", "text_2": "y"}
    scores = {"embeddings.score_template": "{query} {document}", "embeddings.score_tokens": ["a", "b"]}
    with open_gateway(model, RANGE | scores) as gateway:
        gateway.worker.width = json.loads((model / "config.json").read_text())["hidden_size"]
        for fields, heard in (
            ({}, 0),
            ({"priority": 4}, 4),
            ({"priority": 0, "service_tier": "flex"}, 0),
            ({"service_tier": "flex"}, 7),
            ({"service_tier": "priority"}, -3),
            ({"service_tier": "auto"}, 0),
        ):
            assert answer(gateway.http, path, **body, **fields)
            assert gateway.worker.priorities[-1] == heard
        error = refused(post(gateway.http, path, {**body, "priority": 8}), 400)
        assert error["message"] == "priority is 8; it must be from -3 to 7 (gateway.priorities)"


def test_nobody_goes_before_others_unless_the_configuration_says_so(model: Path) -> None:
    with open_gateway(model) as gateway:
        error = refused(post(gateway.http, COMPLETIONS, {"prompt": PROMPT, "priority": -1}), 400)
        assert error["message"].startswith("priority is -1; it must be from 0 to 10")
        assert error["param"] == "priority"
        assert over_http(gateway, COMPLETIONS, service_tier="priority") == 0


def test_waiting_requests_are_placed_by_priority(model: Path) -> None:
    """One waits for the workers, the others behind it, until the island comes."""
    with open_gateway(model, RANGE, alone=True) as gateway, ThreadPoolExecutor(4) as pool:

        def ask(priority: int) -> list[int]:
            return tokens_of(complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS), priority=priority))

        asked = []
        for count, priority in enumerate((5, 0, 7, -3), start=1):
            asked.append(pool.submit(ask, priority))
            until(lambda count=count: gateway.gateway._router.queued == count)
        gateway.island_comes()
        assert [one.result(60) for one in asked] == [TOKENS] * 4
        assert gateway.worker.priorities == [-3, 0, 5, 7]


def test_a_full_queue_gives_up_the_newest_of_the_last_priority(model: Path) -> None:
    with open_gateway(model, {**RANGE, "gateway.max_queued": 3}, alone=True) as gateway:

        async def ask(stub: inference_pb2_grpc.InferenceStub, priority: int) -> int:
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
            request.sampling.priority = priority
            request.sampling.max_tokens = 1
            return len([message async for message in stub.Generate(request)])

        async def run() -> None:
            async with grpc.aio.insecure_channel(gateway.grpc) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                tasks = []
                for count, priority in enumerate((0, 7, 7), start=1):
                    tasks.append(asyncio.create_task(ask(stub, priority)))
                    while gateway.gateway._router.queued < count:
                        await asyncio.sleep(0.01)
                with pytest.raises(grpc.aio.AioRpcError, match="max_queued"):
                    await ask(stub, 7)
                tasks.append(asyncio.create_task(ask(stub, 1)))
                with pytest.raises(grpc.aio.AioRpcError, match="one of a lower priority has come"):
                    await tasks[2]
                await asyncio.to_thread(gateway.island_comes)
                assert [await tasks[index] for index in (0, 1, 3)] == [1, 1, 1]

        asyncio.run(run())
        assert gateway.worker.priorities == [0, 1, 7]


@pytest.mark.parametrize("parked_bytes", [None, 1 << 20])
@pytest.mark.parametrize("would_park", [False, True])
def test_requests_are_parked_where_no_worker_has_room_and_one_would_make_some(
    model: Path, parked_bytes: int | None, would_park: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers are asked once. Then the one that would make room is asked for it, and not the other."""
    monkeypatch.setattr(router, "JUST_NOW_SECONDS", 60.0)
    full = {"PrepareReceive": ["would park" if would_park else "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]}
    with open_gateway(model, {"cache.parked_bytes": parked_bytes}, fails=full, alone=True) as gateway:
        island = gateway.worker.state("i", epoch=1, version=1)
        two = replace(island, workers=(*island.workers, replace(island.workers[1], pe=2)))
        gateway.events.run(gateway.gateway.update_island(two), timeout=10)
        assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))) == TOKENS
        parks = would_park and parked_bytes is not None
        assert gateway.worker.parks == [False, False, parks]


@pytest.mark.parametrize("parked_bytes", [None, 1 << 20])
def test_a_single_worker_makes_room_at_once(model: Path, parked_bytes: int | None) -> None:
    full = {"PrepareReceive": ["RESOURCE_EXHAUSTED"]}
    with open_gateway(model, {"cache.parked_bytes": parked_bytes}, fails=full) as gateway:
        assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))) == TOKENS
        assert gateway.worker.parks == [parked_bytes is not None] * 2


def test_where_both_roles_decode_another_worker_may_have_room(model: Path) -> None:
    """One prefill and one decode worker, each of which may decode: nobody is parked before both are asked."""
    full = {"PrepareReceive": ["RESOURCE_EXHAUSTED"]}
    options = {"cache.parked_bytes": 1 << 20, "scheduler.roles": "adaptive"}
    with open_gateway(model, options, fails=full) as gateway:
        complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))
        assert gateway.worker.parks == [False, False]
