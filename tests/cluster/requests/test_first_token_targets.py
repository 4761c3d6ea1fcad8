"""Tests what workers hear of a request's target for its first token: the seconds that are left of it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.requests.generation import PLANNED
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete, tokens_of
from tests.support.http_client import COMPLETIONS, answer, post
from tests.support.waiting import until

TARGET = 600.0  # seconds; nothing here takes a tenth of it
PLAN = PLANNED * TARGET
SLOWLY = 0.5  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("targets"))


@pytest.fixture
def gateway(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model) as opened:
        yield opened


def ask(gateway: OpenGateway, target: float | None = TARGET, **sampling: Any) -> list[int]:
    given = {} if target is None else {"first_token_seconds": target}
    return tokens_of(complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS), **given, **sampling))


def test_without_a_target_workers_hear_of_none(gateway: OpenGateway) -> None:
    assert ask(gateway, None) == TOKENS
    assert gateway.worker.targets == [None]


def test_a_request_has_its_own_target_or_that_of_the_configuration(model: Path) -> None:
    with open_gateway(model, {"scheduler.first_token_seconds": 50.0}) as gateway:
        assert ask(gateway, None) == TOKENS
        assert ask(gateway) == TOKENS
        assert ask(gateway, 0.01) == TOKENS
        said = answer(gateway.http, COMPLETIONS, **BODY, first_token_seconds=TARGET)
        assert said["choices"][0]["token_ids"] == TOKENS
        configured, own, least, http = gateway.worker.targets
    assert configured is not None
    assert least is not None
    assert 0 < configured <= PLANNED * 50
    for left in (own, http):
        assert left is not None
        assert 0.9 * PLAN < left <= PLAN
    assert least <= PLANNED * 0.01, "it may be past"


def test_what_the_queue_took_is_gone(gateway: OpenGateway) -> None:
    async def room() -> asyncio.Event:
        return asyncio.Event()

    async def gives() -> None:
        assert gateway.worker.room is not None
        gateway.worker.room.set()

    gateway.worker.room = gateway.events.run(room(), timeout=10)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, gateway)
        until(lambda: gateway.running == 1)
        time.sleep(SLOWLY)
        gateway.events.run(gives(), timeout=10)
        assert asked.result(60) == TOKENS
    (left,) = gateway.worker.targets
    assert left is not None
    assert left <= PLAN - SLOWLY


def test_a_lost_request_without_a_token_keeps_its_target(model: Path) -> None:
    with open_gateway(model, fails={"RemoteSend": ["UNAVAILABLE"]}) as gateway:
        assert ask(gateway) == TOKENS
        first, second = gateway.worker.targets
    assert first is not None
    assert second is not None
    assert second < first < PLAN


def test_a_reader_with_tokens_waits_from_the_loss_on(model: Path) -> None:
    """Its reader has had the first token for long."""
    with open_gateway(model, fails={"StartGenerate": ["go on", "go on", "UNAVAILABLE"]}) as gateway:
        assert ask(gateway, TARGET) == TOKENS
        first, second = gateway.worker.targets
    assert first is not None
    assert first < PLAN
    assert second == pytest.approx(PLAN)


def test_a_reader_that_resumes_waits_from_then_on(gateway: OpenGateway) -> None:
    request = inference_pb2.GenerateRequest(request_id="r", resume=inference_pb2.Resume(token_ids=TOKENS[:2]))
    request.token_ids.ids.extend(PROMPT)
    request.sampling.MergeFrom(inference_pb2.SamplingParams(max_tokens=len(TOKENS), seed=1, first_token_seconds=TARGET))
    with grpc.insecure_channel(gateway.grpc) as channel:
        messages = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    assert [token for message in messages for token in message.token_ids] == TOKENS[2:]
    assert gateway.worker.targets == [pytest.approx(PLAN)]


def test_further_answers_are_waited_for_from_their_begin_on(gateway: OpenGateway) -> None:
    """They begin behind the second token of the first one."""
    gateway.worker.step_seconds = SLOWLY
    complete(gateway.grpc, PROMPT, max_tokens=3, n=2, first_token_seconds=TARGET)
    _, further = gateway.worker.targets
    assert further is not None
    assert PLAN - SLOWLY < further < PLAN


@pytest.mark.parametrize("target", [0.0, -1.0, 0.009, 600.1, float("inf"), float("nan")])
def test_other_targets_are_refused(gateway: OpenGateway, target: float) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.first_token_seconds is .*; it must be in \[0\.01, 600\]"):
        ask(gateway, target)
    assert not gateway.worker.targets


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_each_route_that_generates_has_the_field(path: str) -> None:
    from tandem.cluster.frontends.routes import BODIES

    assert "first_token_seconds" in BODIES[path].model_fields


def test_an_error_over_http_names_the_field(gateway: OpenGateway) -> None:
    response = post(gateway.http, COMPLETIONS, {**BODY, "first_token_seconds": 0.001})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "first_token_seconds"
    assert error["message"] == "first_token_seconds is 0.001; it must be in [0.01, 600]"


def test_targets_that_were_met_and_missed_are_counted(gateway: OpenGateway) -> None:
    def counted(outcome: str) -> int:
        with Client(gateway.grpc) as client:
            return int(Samples(client.metrics().text).total("tandem:first_token_targets_total", outcome=outcome))

    ask(gateway, None)
    ask(gateway)
    gateway.worker.fails["PrepareReceive"] = ["RESOURCE_EXHAUSTED"] * 2  # then it is asked after a tenth of a second
    ask(gateway, 0.05)
    until(lambda: (counted("met"), counted("missed")) == (1, 1))
