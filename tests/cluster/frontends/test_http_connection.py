"""HTTP as bytes: requests that two readers could take for two, clients that close their own side, and broken ones."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.open_gateway import BODY, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import events
from tests.support.waiting import until

HELLO = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("connection"))


@pytest.fixture(scope="module")
def quiet(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model) as opened:
        yield opened


def completion(headers: bytes = b"", version: bytes = b"1.1", **fields: Any) -> bytes:
    content = json.dumps({**BODY, **fields}).encode()
    length = b"content-length: %d\r\n" % len(content) if CHUNKED not in headers else b""
    head = b"POST /v1/completions HTTP/%s\r\nhost: localhost\r\ncontent-type: application/json\r\n" % version
    return head + headers + length + b"\r\n" + content


def connected(opened: OpenGateway) -> socket.socket:
    host, _, port = opened.http.rpartition(":")
    return socket.create_connection((host, int(port)), 60)


def said(connection: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def ask(opened: OpenGateway, request: bytes, *, half_closed: bool = False) -> list[tuple[int, bytes]]:
    """Statuses and bodies of all answers on one connection, until the server closes it."""
    with connected(opened) as connection:
        connection.sendall(request)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        return list(answers(said(connection)))


def answers(received: bytes) -> Iterator[tuple[int, bytes]]:
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            continue
        if b"chunked" in head:
            body = b""
            while size := int(received.partition(b"\r\n")[0], 16):
                received = received.partition(b"\r\n")[2]
                body, received = body + received[:size], received[size + 2 :]
            yield status, body
            received = received.partition(b"\r\n\r\n")[2]
        else:
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            yield status, received[:length]
            received = received[length:]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("request_bytes", "reason"),
        [
            (completion(b"content-length: 5\r\n" + CHUNKED), "content-length and transfer-encoding"),
            (completion(CHUNKED + b"Content-Length: 0\r\n"), "content-length and transfer-encoding"),
            (completion(CHUNKED, version=b"1.0"), "transfer-encoding is set; it needs HTTP/1.1 or later"),
            (completion(b"content-length: 5\r\n"), "conflicting Content-Length"),
            (completion(b"transfer-encoding: gzip, chunked\r\n"), "Only Transfer-Encoding: chunked"),
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\n folded: 1\r\nx : 1\r\n\r\n", "illegal header"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "illegal request line"),
        ],
    )
    def test_requests_with_two_ends_or_none(self, quiet: OpenGateway, request_bytes: bytes, reason: str) -> None:
        """Bytes after such a request are never read as a request."""
        ((status, body),) = ask(quiet, request_bytes + HELLO)
        assert status == 400
        assert reason in json.loads(body)["error"]["message"]

    def test_behind_a_good_request(self, quiet: OpenGateway) -> None:
        first, second = ask(quiet, HELLO + completion(b"content-length: 5\r\n" + CHUNKED) + HELLO)
        assert (first[0], second[0]) == (200, 400)

    @pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere"])
    def test_a_body_that_breaks(self, quiet: OpenGateway, path: bytes, caplog: pytest.LogCaptureFixture) -> None:
        """Also where the answer has begun before: the connection ends, and nothing fails."""
        head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path + CHUNKED + b"\r\n"
        with caplog.at_level(logging.WARNING), connected(quiet) as connection:
            connection.sendall(head + b"1\r\n{\r\n")
            if path == b"/nowhere":
                assert connection.recv(100).startswith(b"HTTP/1.1 404")
            connection.sendall(b"no chunk\r\n" + HELLO)
            rest = said(connection)
        assert rest.startswith(b"HTTP/1.1 400") == (path != b"/nowhere")
        assert b'"ok"' not in rest
        assert [record.message for record in caplog.records] in ([], ["Invalid HTTP request received."])


class TestHalfClosed:
    def test_it_is_answered_in_full(self, quiet: OpenGateway) -> None:
        ((status, body),) = ask(quiet, completion(), half_closed=True)
        assert (status, json.loads(body)["choices"][0]["token_ids"]) == (200, TOKENS)

    def test_so_is_all_that_it_asked(self, quiet: OpenGateway) -> None:
        statuses = [status for status, _ in ask(quiet, HELLO + completion() + HELLO + b"GET /hea", half_closed=True)]
        assert statuses == [200, 200, 200]

    @pytest.mark.parametrize("version", [b"1.0", b"1.1"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_it_may_wait(self, model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, version: bytes) -> None:
        """The server's looks at whether the client is there are no part of the answer."""
        monkeypatch.setattr("tandem.cluster.frontends.http.connection.LOOK_SECONDS", 0.01)
        with open_gateway(model, alone=True) as opened, connected(opened) as connection:
            opened.worker.step_seconds = 0.03
            connection.sendall(completion(version=version, stream=stream))
            connection.shutdown(socket.SHUT_WR)
            until(lambda: opened.gateway._router.queued)
            opened.island_comes()
            received = said(connection)
        assert received.startswith(b"HTTP/1.1 100") == (version == b"1.1")
        if stream and version == b"1.0":
            body = received.partition(b"\r\n\r\n")[2]
        else:
            ((_, body),) = answers(received)
        if stream:
            lines = body.decode().splitlines()
            assert ":" in lines
            parts = list(events(line for line in lines if line != ":"))
        else:
            parts = [json.loads(body)]
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == TOKENS

    def test_half_a_request_is_none(self, quiet: OpenGateway) -> None:
        assert ask(quiet, completion()[:-5], half_closed=True) == []
        until(lambda: not quiet.running)
