"""Readiness apart from liveness, and who may read metrics, of a gateway whose workers answer as the test says."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.routing.membership import IslandState
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete, tokens_of
from tests.support.http_client import COMPLETIONS, answer, get, refused
from tests.support.waiting import until

TOKEN = "a-token-of-enough-characters-to-be-taken"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


def serves(gateway: OpenGateway, service: str) -> bool:
    with grpc.insecure_channel(gateway.grpc) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def unready(gateway: OpenGateway) -> str:
    """Returns why the gateway is not ready, over HTTP. gRPC reports the same, and that the gateway lives."""
    response = get(gateway.http, "/ready")
    assert response.status_code in (200, 503)
    assert get(gateway.http, "/health").status_code == 200
    ready = response.status_code == 200
    assert serves(gateway, "") == serves(gateway, "tandem.v1.Inference") == ready
    assert serves(gateway, "tandem.v1.Admin")
    return response.json().get("reason", "")


def update(gateway: OpenGateway, state: IslandState) -> None:
    gateway.events.run(gateway.gateway.update_island(state), timeout=10)


def test_a_gateway_is_ready_while_an_island_serves(model: Path) -> None:
    with open_gateway(model, alone=True) as gateway:
        assert "starting" in unready(gateway)
        gateway.island_comes()
        assert unready(gateway) == ""
        update(gateway, IslandState("i", 1, 0, (), version=2))
        assert "no island has a prefill and a decode worker" in unready(gateway)
        update(gateway, gateway.worker.state("i", epoch=2, version=3))
        assert unready(gateway) == ""


@pytest.mark.parametrize("roles", ["split", "adaptive"])
def test_it_takes_both_roles_unless_any_worker_may_do_anything(model: Path, roles: str) -> None:
    with open_gateway(model, {"scheduler.roles": roles}, alone=True) as gateway:
        whole = gateway.worker.state("i", epoch=1, version=1)
        update(gateway, IslandState("i", 1, 0, whole.workers[1:], version=1))
        assert ("no island" in unready(gateway)) == (roles == "split")


async def begun(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()


def test_a_gateway_that_drains_serves_on_for_a_while(model: Path) -> None:
    with open_gateway(model, {"gateway.drain_seconds": 3600}) as gateway:
        draining = gateway.events.run(begun(gateway.gateway.drain()), timeout=10)
        until(lambda: "draining" in unready(gateway))
        assert tokens_of(complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))) == TOKENS
        assert answer(gateway.http, COMPLETIONS, **BODY)["choices"][0]["token_ids"] == TOKENS
        assert not draining.done()
        gateway.events.run(cancelled(draining), timeout=10)


def test_a_gateway_that_cannot_serve_drains_at_once(model: Path) -> None:
    with open_gateway(model, {"gateway.drain_seconds": 3600}, alone=True) as gateway:
        gateway.events.run(gateway.gateway.drain(), timeout=10)


def test_metrics_have_a_port_of_their_own(model: Path) -> None:
    with open_gateway(model, {"metrics.port": 0}) as gateway:
        address = gateway.gateway._addresses.metrics or ""
        assert address not in ("", gateway.http)
        assert "vllm:num_requests_running" in get(address, "/metrics").text
        assert get(address, "/ready").status_code == get(address, "/health").status_code == 200
        refused(get(address, "/v1/models"), 404)
        refused(get(gateway.http, "/metrics"), 404)


def test_they_need_no_other_http_port(model: Path) -> None:
    with open_gateway(model, {"metrics.port": 0, "gateway.http_port": None}) as gateway:
        assert gateway.http == ""
        assert get(gateway.gateway._addresses.metrics or "", "/metrics").status_code == 200


@pytest.mark.parametrize("public", [False, True])
def test_who_may_read_them(model: Path, token_file: str, public: bool) -> None:
    options = {"metrics.public": public, "metrics.port": 0, "security.token_file": token_file}
    with open_gateway(model, options) as gateway:
        address = gateway.gateway._addresses.metrics or ""
        assert get(address, "/metrics").status_code == (200 if public else 401)
        assert get(address, "/metrics", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert get(address, "/ready").status_code == 200
        assert get(gateway.http, "/v1/models").status_code == 401


def test_the_load_counts_requests_that_wait_and_that_run(model: Path) -> None:
    with open_gateway(model, {"metrics.port": 0}, alone=True) as gateway:
        monitor = gateway.gateway._addresses.metrics or ""
        assert get(gateway.http, "/load").json() == {"server_load": 0}
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(answer, gateway.http, COMPLETIONS, **BODY) for _ in range(2)]
            until(lambda: get(gateway.http, "/load").json() == {"server_load": 2})
            assert get(monitor, "/load").json() == {"server_load": 2}
            gateway.island_comes()
            assert [one.result(60)["choices"][0]["token_ids"] for one in asked] == [TOKENS] * 2
        until(lambda: get(gateway.http, "/load").json() == {"server_load": 0})


def test_the_load_needs_a_token(model: Path) -> None:
    with open_gateway(model, {"security.api_key": TOKEN}) as gateway:
        assert get(gateway.http, "/load").status_code == 401
        assert get(gateway.http, "/load", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(("public", "status"), [(False, 421), (True, 200)])
def test_under_which_names(model: Path, public: bool, status: int) -> None:
    with open_gateway(model, {"metrics.public": public}) as gateway:
        assert get(gateway.http, "/metrics", headers={"host": "tandem.example"}).status_code == status


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        ({"metrics.port": 0, "metrics.enabled": False}, "metrics.enabled"),
        ({"metrics.port": 50051}, "metrics.port"),
        ({"metrics.port": 0, "metrics.host": "0.0.0.0"}, "metrics.host"),
        ({"metrics.port": 65536}, "metrics.port"),
        ({"gateway.drain_seconds": -1}, "drain_seconds"),
    ],
)
def test_settings_that_cannot_be(overrides: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_config(None, overrides)


def test_many_scrapes_at_once_ask_each_worker_once(model: Path) -> None:
    answers = ["go on"] * 100
    with open_gateway(model, fails={"GetStatus": answers}) as gateway:
        scrape = gateway.gateway._admin._scrape
        assert scrape is not None

        async def many() -> list[bytes]:
            return await asyncio.gather(*(scrape.text() for _ in range(50)))

        assert len(set(gateway.events.run(many(), timeout=10))) == 1
        assert len(answers) == 98
