"""A client that knows several gateways goes on at another one when one is gone."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from tandem.cluster.client import AsyncClient, Client, client
from tandem.cluster.client.client_messages import SEVERAL_OPTIONS
from tandem.cluster.errors import ConfigError, InvalidRequest, Unavailable
from tests.cluster.client.test_client import both
from tests.cluster.fake_gateway import FakeGateway, serving

GONE = (grpc.StatusCode.UNAVAILABLE, "the cluster ends: it was stopped")


@pytest.fixture
def nobody() -> str:
    """Returns an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@both
def test_a_stream_goes_on_at_the_next_one_with_the_tokens_that_have_come(generate: Any) -> None:
    first, second = FakeGateway(fails=GONE), FakeGateway()
    with serving(first) as one, serving(second) as other:
        updates = generate([one, other], "hello")
    assert [update.text for update in updates] == ["one", " two", "one", " two", ""]  # it does not look at resume
    (begun,), (resumed,) = first.requests, second.requests
    assert not begun.HasField("resume")
    assert list(resumed.resume.token_ids) == [0, 1]
    assert (resumed.request_id, resumed.sampling.seed) == (begun.request_id, begun.sampling.seed)


@contextmanager
def silenced(address: str) -> Iterator[tuple[str, threading.Event]]:
    """A way to a gateway, on which nothing arrives any more once the event is set, though no connection ends."""
    cut, (host, _, port) = threading.Event(), address.rpartition(":")

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not cut.is_set():
                    target.sendall(data)

    def serve() -> None:
        near, _ = listener.accept()  # later ones are never answered
        with near, socket.create_connection((host, int(port))) as far, ThreadPoolExecutor(2) as pool:
            pool.submit(pass_on, near, far)
            pool.submit(pass_on, far, near)
            done.wait()
            for end in (near, far):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        yield f"127.0.0.1:{listener.getsockname()[1]}", cut
        done.set()


def test_a_stream_of_a_gateway_that_fell_silent_goes_on_at_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter timeouts let the test take seconds, not the 15 of other clients."""
    shorter = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(client, "SEVERAL_OPTIONS", [*(dict(SEVERAL_OPTIONS) | shorter).items()])
    first, second = FakeGateway(hangs=True), FakeGateway()
    with serving(first) as one, serving(second) as other:
        with silenced(one) as (way, cut), Client([way, other]) as several:
            updates = several.generate("hello", timeout=60)
            words = [next(updates).text for _ in range(2)]
            cut.set()
            words += [update.text for update in updates]
        first.cancelled.set()
    assert words == ["one", " two", "one", " two", ""]
    assert list(second.requests[0].resume.token_ids) == [0, 1]


@both
def test_a_gateway_that_is_not_there_is_passed_over(generate: Any, nobody: str) -> None:
    with serving(FakeGateway()) as address:
        assert generate(f"{nobody}, {address}", "hello")[-1].finish_reason == "stop"


def test_other_calls_are_asked_of_the_next_one_and_stay_there(nobody: str) -> None:
    gateway = FakeGateway()
    with serving(gateway) as address, Client([nobody, address]) as several:
        assert several.address == nobody
        assert several.model_info().name == "tiny"
        assert several.address == address
        list(several.generate("x"))
    assert len(gateway.requests) == 1


def test_what_a_gateway_refuses_is_asked_of_no_other(nobody: str) -> None:
    refusing, other = FakeGateway(fails=(grpc.StatusCode.INVALID_ARGUMENT, "no")), FakeGateway()
    with serving(refusing) as one, serving(other) as two, Client([one, two]) as several:
        with pytest.raises(InvalidRequest):
            list(several.generate("x"))
        with pytest.raises(InvalidRequest):
            several.model_info()
    assert not other.requests


def test_without_any_the_last_one_is_named(nobody: str) -> None:
    with Client([nobody, nobody], resume_seconds=0.0) as several:
        with pytest.raises(Unavailable, match=f"^{nobody}: no gateway answers there"):
            several.model_info()
        with pytest.raises(Unavailable, match=f"^{nobody}: no gateway answers there"):
            list(several.generate("x"))


@pytest.mark.parametrize("address", ["", "a:1,", [], ["a:1", " "]])
def test_an_empty_address_is_refused(address: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=r"^address is .*; it must be HOST:PORT, or several"):
            kind(address)
