"""gateway.max_calls: one limit for what comes through both frontends."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.cluster.client import Client
from tandem.cluster.errors import Overloaded
from tandem.cluster.frontends.grpc_server import OPEN_CALLS
from tandem.cluster.protocol import build_request
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of
from tests.support.http_client import COMPLETIONS, answer, get, refused
from tests.support.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("limit"))


@pytest.fixture
def narrow(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model, {"gateway.max_calls": 1}, alone=True) as opened:
        yield opened


def health(opened: OpenGateway) -> Any:
    with grpc.insecure_channel(opened.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status


def assert_full(opened: OpenGateway, client: Client) -> None:
    """Both frontends say so, and when to come again; who asks for their health has an answer."""
    with pytest.raises(Overloaded, match=r"1 calls are under way; gateway\.max_calls is 1") as caught:
        client.model_info()
    assert caught.value.retry_after_seconds == 1.0
    response = get(opened.http, "/v1/models")
    assert "gateway.max_calls is 1" in refused(response, 429)["message"]
    assert response.headers["retry-after"] == "1"
    assert get(opened.http, "/health").status_code == 200
    assert health(opened) == health_pb2.HealthCheckResponse.NOT_SERVING


def test_an_http_call_counts_at_both_frontends(narrow: OpenGateway) -> None:
    asked = threading.Thread(target=partial(answer, narrow.http, COMPLETIONS, **BODY))
    asked.start()
    until(lambda: narrow.running)
    with Client(narrow.grpc) as client:
        assert_full(narrow, client)
        narrow.island_comes()
        asked.join(30)
        assert client.model_info().vocab_size
    assert get(narrow.http, "/v1/models").status_code == 200


@pytest.mark.parametrize("leaves", [False, True])
def test_a_grpc_call_counts_at_both_frontends(narrow: OpenGateway, leaves: bool) -> None:
    with Client(narrow.grpc) as client:
        first = client._gateway.inference.Generate(build_request(PROMPT, {"max_tokens": len(TOKENS)}, None), timeout=60)
        until(lambda: narrow.running)
        assert_full(narrow, client)
        if leaves:
            first.cancel()
        else:
            narrow.island_comes()
            assert [token for message in first for token in message.token_ids] == TOKENS
        until(lambda: get(narrow.http, "/v1/models").status_code == 200)
        narrow.island_comes()
        assert tokens_of(list(client.generate(PROMPT, max_tokens=len(TOKENS)))) == TOKENS


def test_questions_after_health_take_no_room(narrow: OpenGateway) -> None:
    """A stranger may ask them, and may ask them for ever: they are counted by themselves, and so is who asks once."""
    with grpc.insecure_channel(narrow.grpc) as channel, Client(narrow.grpc) as client:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(OPEN_CALLS)]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert (
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == health_pb2.HealthCheckResponse.NOT_SERVING
        )
        assert client.model_info().vocab_size
