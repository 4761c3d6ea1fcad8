"""Clients that say nothing, or not enough, or take nothing: neither frontend waits for them without bound."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tandem.cluster.client import Client
from tandem.cluster.frontends.grpc_server import server_options
from tandem.proto import inference_pb2
from tests.cluster.open_gateway import BODY, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import COMPLETIONS, answer, get
from tests.support.waiting import until

DRIP_SECONDS = 0.02
TOKEN = "0123456789abcdef-token"
HEALTH_CALL = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04" + bytes(5)  # and an empty SETTINGS frame
PING = b"\0\0\x08\x06\0" + bytes(4) + b"12345678"
METHODS = [
    ("/tandem.v1.Inference/Generate", inference_pb2.GenerateRequest),
    ("/tandem.v1.Inference/GetModelInfo", inference_pb2.GetModelInfoRequest),
    ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflection_pb2.ServerReflectionRequest),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("silent"))


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 60)


def ended(connection: socket.socket, said: bytes = b"") -> bool:
    """Sends `said`, waits a moment, and returns whether the server has closed the connection."""
    connection.settimeout(DRIP_SECONDS)
    try:
        connection.sendall(said)
        while connection.recv(1 << 16):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def connections(opened: OpenGateway) -> set[Any]:
    assert opened.gateway._http is not None
    return opened.gateway._http._server.server_state.connections


class TestHttp:
    @pytest.mark.parametrize("before", [b"", HEALTH_CALL], ids=["at first", "after an answer"])
    @pytest.mark.parametrize("drop", [b"", b"G"], ids=["nothing", "a letter at a time"])
    def test_a_request_that_does_not_come(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, drop: bytes
    ) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.IDLE_SECONDS", 0.1)
        with open_gateway(model, alone=True) as opened, connected(opened.http) as connection:
            if before:
                connection.sendall(before)
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            until(lambda: ended(connection, drop))

    def test_a_call_under_way_is_not_idle(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.IDLE_SECONDS", 0.1)
        with open_gateway(model, alone=True) as opened:
            answers: list[Any] = []
            asked = threading.Thread(target=lambda: answers.append(answer(opened.http, COMPLETIONS, **BODY)))
            asked.start()
            until(lambda: opened.running)
            with connected(opened.http) as later:
                until(lambda: ended(later))
            opened.island_comes()
            asked.join(30)
            assert answers[0]["choices"][0]["token_ids"] == TOKENS

    def test_the_longest_idle_makes_room(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.connections_per_frontend", lambda: 2)
        with open_gateway(model, alone=True) as opened:
            asked = threading.Thread(target=partial(answer, opened.http, COMPLETIONS, **BODY))
            asked.start()
            until(lambda: opened.running)
            with connected(opened.http) as idle:
                until(lambda: len(connections(opened)) == 2)
                assert get(opened.http, "/health").status_code == 200
                until(lambda: ended(idle))
            opened.island_comes()
            asked.join(30)
            assert get(opened.http, "/health").status_code == 200

    def test_many_at_once_make_room_for_each_other(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.connections_per_frontend", lambda: 3)
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.IDLE_SECONDS", 600.0)
        with open_gateway(model, alone=True) as opened, ExitStack() as stack:
            held = threading.Event()
            opened.events._loop.call_soon_threadsafe(held.wait, 5)  # until then the server accepts nobody
            for _ in range(12):
                stack.enter_context(connected(opened.http))
            held.set()
            assert get(opened.http, "/health").status_code == 200
            until(lambda: len(connections(opened)) <= 3)

    def test_answers_that_nobody_takes(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        short = ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 100)
        monkeypatch.setattr("tandem.workers.ports.listener.OPTIONS", (short,))
        with open_gateway(model, alone=True) as opened, connected(opened.http) as connection:
            connection.settimeout(0.5)
            with suppress(OSError):
                while True:
                    connection.sendall(HEALTH_CALL * 100)
            until(lambda: not connections(opened))

    def test_what_vanishes_is_noticed(self, model: Path) -> None:
        """Connections have the options of the socket that they come through."""
        with open_gateway(model, alone=True) as opened:
            assert opened.gateway._http is not None
            (listener,) = opened.gateway._http._server.servers[0].sockets
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert 0 < listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
            assert 0 < listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


@contextmanager
def unsaid(address: str, method: str, metadata: Any = None) -> Iterator[Any]:
    """A call whose request does not come while the block lasts."""
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        over.wait(120)
        yield from ()

    with grpc.insecure_channel(address) as channel:
        try:
            yield channel.stream_stream(method)(requests(), metadata=metadata)
        finally:
            over.set()


def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


class TestGrpc:
    @pytest.mark.parametrize("method", [method for method, _ in METHODS])
    def test_a_request_that_does_not_come(self, model: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.REQUEST_SECONDS", 0.1)
        with open_gateway(model, alone=True) as opened, unsaid(opened.grpc, method) as call:
            code, details = status(call)
            assert (code, details[:24]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")

    @pytest.mark.parametrize("method", [method for method, _ in METHODS[:3]])
    def test_a_call_without_a_request(self, model: Path, method: str) -> None:
        with open_gateway(model, alone=True) as opened, grpc.insecure_channel(opened.grpc) as channel:
            code, details = status(channel.stream_stream(method)(iter(()), timeout=60))
        assert (code, details[:23]) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")

    @pytest.mark.parametrize("method", [METHODS[0][0], METHODS[3][0], "/tandem.v1.Inference/NoSuchMethod"])
    def test_a_stranger_is_not_waited_for(self, model: Path, tmp_path: Path, method: str) -> None:
        """Nor does it count among the calls."""
        (tmp_path / "token").write_text(TOKEN)
        (tmp_path / "token").chmod(0o600)
        with (
            open_gateway(model, {"security.token_file": str(tmp_path / "token")}, alone=True) as opened,
            unsaid(opened.grpc, method) as call,
        ):
            assert status(call)[0] == grpc.StatusCode.UNAUTHENTICATED

    def test_a_connection_without_calls(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.IDLE_MS", 100)
        with open_gateway(model, alone=True) as opened, Client(opened.grpc) as client:
            assert client.model_info().vocab_size
            with connected(opened.grpc) as connection:
                connection.sendall(PREFACE)
                until(lambda: ended(connection))
            assert client.model_info().vocab_size  # it connects anew

    @pytest.mark.parametrize("said", [b"", PREFACE[:10]])
    def test_a_connection_that_does_not_begin(self, model: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
        monkeypatch.setattr("tandem.workers.ports.guarded_port.SILENT_SECONDS", 0.1)
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.sendall(said)
            until(lambda: ended(connection))

    @pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0"])
    def test_another_protocol(self, model: Path, said: bytes) -> None:
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.sendall(said)
            until(lambda: ended(connection))

    def test_a_client_that_vanishes(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It sends a whole call, and then answers no ping."""
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.SILENT_MS", 200)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5]))
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.sendall(PREFACE + whole_call("/tandem.v1.Inference/Generate", request.SerializeToString()))
            until(lambda: opened.running)
            until(lambda: not opened.running)

    def test_a_client_that_answers_for_a_while_and_then_vanishes(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is asked for a sign of life again and again, not only when it has sent something."""
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.SILENT_MS", 500)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5])).SerializeToString()
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.settimeout(20)
            connection.sendall(PREFACE + whole_call("/tandem.v1.Inference/Generate", request))
            until(lambda: opened.running)
            for _ in range(5):
                connection.sendall(_frame(6, 0x1, pinged(connection), stream=0))
            assert opened.running
            until(lambda: not opened.running)

    def test_bounds_on_silence(self) -> None:
        """Each has a default of its own that is much longer, or none."""
        options = dict(server_options(1 << 20))
        for name in ("keepalive_time_ms", "keepalive_timeout_ms", "http2.ping_timeout_ms"):
            assert options[f"grpc.{name}"] == 60_000
        assert options["grpc.max_connection_idle_ms"] == 600_000

    @pytest.mark.parametrize("calls", [False, True])
    def test_a_client_that_pings_often(self, model: Path, monkeypatch: pytest.MonkeyPatch, calls: bool) -> None:
        """Each 10 s is usual. gRPC's own limit is 5 minutes beside a call, and 2 hours without one."""
        monkeypatch.setattr("tandem.workers.ports.connections.PING_MS", 10)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5])).SerializeToString()
        call = whole_call("/tandem.v1.Inference/Generate", request) if calls else b""
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.sendall(PREFACE + call)
            until(lambda: opened.running == int(calls))
            for _ in range(8):  # each behind the answer to the one before: else a busy server sees two at once
                connection.sendall(PING)
                assert _answered(connection)
                time.sleep(0.02)

    def test_a_client_that_only_pings(self, model: Path) -> None:
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as connection:
            connection.sendall(PREFACE)
            until(lambda: ended(connection, PING))

    def test_connections_are_bounded(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.connections_per_frontend", lambda: 1)
        with open_gateway(model, alone=True) as opened, connected(opened.grpc) as first:
            first.sendall(PREFACE)
            assert first.recv(100)  # it is taken
            with connected(opened.grpc) as second:
                until(lambda: ended(second))
            assert not ended(first)


def whole_call(method: str, message: bytes) -> bytes:
    """A gRPC call as HTTP/2 frames of stream 1, its headers as literals (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    literals = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    body = struct.pack(">BI", 0, len(message)) + message
    return _frame(1, 0x4, literals) + _frame(0, 0x1, body)  # HEADERS that end the headers, DATA that ends the stream


def pinged(connection: socket.socket) -> bytes:
    """Returns the content of the server's next ping. TimeoutError if none comes."""
    while True:
        head = _all_of(connection, 9)
        payload = _all_of(connection, int.from_bytes(head[:3]))
        if head[3] == 6 and not head[4] & 0x1:
            return payload


def _answered(connection: socket.socket) -> bool:
    """Returns whether a ping is answered; False if the server announces the connection's end."""
    while True:
        head = _all_of(connection, 9)
        _all_of(connection, int.from_bytes(head[:3]))
        if head[3] in (6, 7) and (head[3] == 7 or head[4] & 0x1):
            return head[3] == 6


def _all_of(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(size - len(content))
        assert more, "the server has closed the connection"
        content += more
    return content


def _frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
