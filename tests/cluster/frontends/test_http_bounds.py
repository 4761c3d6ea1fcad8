"""Tests what one HTTP connection may cost the event loop, and how a client is refused while it sends."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.frontends.http.app import HttpApp, Routes
from tandem.cluster.frontends.http.body import read_body_of
from tandem.cluster.frontends.http.connection import Connection
from tandem.cluster.frontends.http.monitoring import Monitoring
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.http.server import HttpServer
from tandem.cluster.frontends.http.strict_http import StrictHttp
from tandem.cluster.keys.gate import Gate
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.call_limit import CallLimit
from tandem.workers.event_loop import EventLoopThread
from tandem.workers.ports.authentication import BearerToken
from tandem.workers.ports.listener import ACCEPTED

TOKEN = "0123456789abcdef"
MOST_BYTES = 1 << 18
MOST_EVENTS_OF_A_TURN = 80  # of one connection
PATIENCE = 30.0
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
ONE_BYTE = b"1\r\n \r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def head(*headers: bytes, method: bytes = b"POST", path: bytes = b"/echo", token: str = TOKEN) -> bytes:
    """Without its end."""
    lines = (b"host: localhost", b"content-type: application/json", b"authorization: Bearer %s" % token.encode())
    return b"".join(line + b"\r\n" for line in (b"%s %s HTTP/1.1" % (method, path), *lines, *headers))


def sized(content: bytes) -> bytes:
    return head(b"content-length: %d" % len(content)) + b"\r\n" + content


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return json.loads(self.body)["error"]["message"]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def answer(self) -> Answer:
        said = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = said.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return Answer(int(status.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"])))

    async def ask(self, content: bytes) -> Answer:
        await self.say(content)
        return await self.answer()

    async def is_ended(self) -> bool:
        """Waits until the server ends the connection. Returns whether the server says nothing more before."""
        return await self.reader.read() == b""

    async def say_until_closed(self, content: bytes, pause: float = 0.0) -> None:
        """Returns once the server takes no more."""
        with suppress(OSError):
            while True:
                await self.say(content)
                await asyncio.sleep(pause)


@dataclass
class Parsed:
    """Counts what h11 parsed, by the turn of the event loop in which it did."""

    turn: int = 0
    events: Counter[int] = field(default_factory=Counter)

    @property
    def most(self) -> int:
        return max(self.events.values())

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


@dataclass
class Open:
    loop: EventLoopThread
    port: int
    got: list[bytes]  # bodies that were read whole

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()

    def run(self, test: Callable[[], Awaitable[None]], parsed: Parsed | None = None) -> None:
        """Runs it beside the server, in its event loop, whose turns it counts in `parsed`."""

        async def run() -> None:
            counting = asyncio.ensure_future((parsed or Parsed()).count_turns())
            try:
                await test()
            finally:
                counting.cancel()

        self.loop.run(run(), PATIENCE)


@pytest.fixture(scope="module")
def opened() -> Iterator[Open]:
    bodies, got, loop = BodyBudget(8 * MOST_BYTES, MOST_BYTES), [], EventLoopThread("bounds")

    async def echo(scope: Scope, receive: Receive, reply: Reply) -> None:
        held = bodies.open("")
        try:
            got.append(bytes(await read_body_of(scope, receive, held, MOST_BYTES)))
        finally:
            held.release()
        await reply.whole(200, len(got[-1]))

    routes: Routes = {"/echo": (("POST",), echo)}
    monitoring = Monitoring(lambda: "", None, public=False)
    gate = Gate(BearerToken(TOKEN).admits, None)
    app = HttpApp(routes, monitoring, limit=CallLimit(64), gate=gate, rejected=lambda status: None)
    server = HttpServer(app, "127.0.0.1", 0, ServerSecurity(), shared=False)
    try:
        port = int(loop.run(server.start(), PATIENCE).rpartition(":")[2])
        yield Open(loop, port, got)
    finally:
        loop.run(server.stop(0.1), PATIENCE)
        loop.stop()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    found = Parsed()
    parse = StrictHttp.next_event

    def counted(http: StrictHttp) -> Any:
        before = http.events
        try:
            return parse(http)
        finally:
            found.events[found.turn] += http.events - before

    monkeypatch.setattr(StrictHttp, "next_event", counted)
    return found


class TestTurns:
    def test_tiny_chunks_are_parsed_in_many_turns(self, opened: Open, parsed: Parsed) -> None:
        async def test() -> None:
            async with opened.client() as client:
                content = head(CHUNKED.rstrip()) + b"\r\n" + ONE_BYTE * 2000 + b"0\r\n\r\n"
                assert (await client.ask(content)).body == b"2000"
            assert parsed.events.total() > 2000
            assert parsed.most <= MOST_EVENTS_OF_A_TURN

        opened.run(test, parsed)

    def test_so_are_those_of_many_connections(self, opened: Open, parsed: Parsed) -> None:
        """A small request beside them waits for none of them."""

        async def test() -> None:
            content = head(CHUNKED.rstrip()) + b"\r\n" + ONE_BYTE * 2000 + b"0\r\n\r\n"
            async with opened.client() as honest:
                await honest.ask(HEALTH)
                attackers = [asyncio.ensure_future(self._ask(opened, content)) for _ in range(16)]
                while len(parsed.events) < 50:
                    await asyncio.sleep(0)
                before = parsed.events.total()
                assert (await honest.ask(HEALTH)).status == 200
                assert parsed.events.total() - before < 16 * 2000 / 4
                assert {answer.body for answer in await asyncio.gather(*attackers)} == {b"2000"}
            few = sorted(parsed.events.values())[: -len(attackers) * 2]  # but for the turns in which all began
            assert max(few) <= 4 * MOST_EVENTS_OF_A_TURN

        opened.run(test, parsed)

    @staticmethod
    async def _ask(opened: Open, content: bytes) -> Answer:
        async with opened.client() as client:
            return await client.ask(content)

    def test_large_bodies_come_in_few_events(self, opened: Open, parsed: Parsed) -> None:
        async def test() -> None:
            content = b'{"a":\n"%s"}' % (b"x\n" * 60_000)
            async with opened.client() as client:
                assert (await client.ask(sized(content))).body == b"%d" % len(content)
                of_length = parsed.events.total()
                chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
                assert (await client.ask(head() + CHUNKED + chunks)).body == b"%d" % len(content)
            assert opened.got[-2:] == [content, content]
            assert parsed.events.total() - of_length < of_length + 10 < 60

        opened.run(test, parsed)

    def test_a_request_may_come_a_byte_at_a_time(self, opened: Open) -> None:
        async def test() -> None:
            async with opened.client() as client:
                chunked = head() + CHUNKED + b"2;a=b\r\n{}\r\n3\r\n   \r\n0\r\nx: y\r\n\r\n"
                for byte in sized(b"{}") + chunked:
                    await client.say(bytes([byte]))
                    await asyncio.sleep(0)
                assert [(await client.answer()).body for _ in range(2)] == [b"2", b"5"]
            assert opened.got[-2:] == [b"{}", b"{}   "]

        opened.run(test)

    def test_pipelined_requests_are_answered_in_order(self, opened: Open, parsed: Parsed) -> None:
        async def test() -> None:
            bodies = [b" " * (number % 7) + b"{}" for number in range(60)]
            asked = b"".join(sized(body) + HEALTH + head() + CHUNKED + b"1\r\n1\r\n0\r\n\r\n" for body in bodies)
            async with opened.client() as client:
                client.writer.write(asked)
                for body in bodies:
                    assert (await client.answer()).body == b"%d" % len(body)
                    assert json.loads((await client.answer()).body) == {"status": "ok"}
                    assert (await client.answer()).body == b"1"
            assert parsed.most <= MOST_EVENTS_OF_A_TURN

        opened.run(test, parsed)

    def test_few_connections_are_taken_in_a_turn(
        self, opened: Open, parsed: Parsed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though many may wait."""
        made: Counter[int] = Counter()
        of_uvicorn = Connection.connection_made

        def counted(connection: Connection, transport: asyncio.BaseTransport) -> None:
            made[parsed.turn] += 1
            of_uvicorn(connection, transport)

        monkeypatch.setattr(Connection, "connection_made", counted)

        async def test() -> None:
            with ExitStack() as stack:
                for _ in range(100):  # while the event loop stands
                    stack.enter_context(socket.create_connection(("127.0.0.1", opened.port)))
                async with opened.client() as client:
                    assert (await client.ask(HEALTH)).status == 200

        opened.run(test, parsed)
        assert made.total() == 101
        assert max(made.values()) <= ACCEPTED + 1  # Python 3.13 takes one more than it is told


class TestHeadsAndFraming:
    @pytest.mark.parametrize(
        ("request_bytes", "reason"),
        [
            (head(*(b"a: b" for _ in range(128))), "the head has 133 lines; it may have at most 128"),
            (head(path=b"/" + b"%41" * 1400), "the request line has 4216 bytes; it may have at most 4096"),
            (head(b"a: " + b"x" * (16 << 10)), "the head has more than 16384 bytes"),
            (head(b"a:" + b" " * 9000 + b"\0"), r"illegal header line: it has the byte b'\x00'"),
            (head(b"a:" + b" " * 9000 + b"\r\r"), r"illegal header line: it has the byte b'\r'"),
            (head(b"a:" + b" " * 9000 + b"\f"), r"illegal header line: it has the byte b'\x0c'"),
        ],
    )
    def test_heads_that_take_long_to_parse(self, opened: Open, request_bytes: bytes, reason: str) -> None:
        """Their clients read why, however much they have sent."""

        async def test() -> None:
            async with opened.client() as client:
                answer = await client.ask(request_bytes + b"\r\n" + HEALTH * 20_000)
                assert (answer.status, answer.message) == (400, reason)
                assert await client.is_ended()

        opened.run(test)

    @pytest.mark.parametrize(
        "body",
        [
            b"1;" + b" " * 9000 + b"\n\r\n{\r\n0\r\n\r\n",
            b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
            b"2\r\n{}\r\n0\r\na:" + b" " * 9000 + b"\0\r\n\r\n",
        ],
    )
    @pytest.mark.parametrize("piece", [100, 1 << 20])
    def test_framing_that_takes_long_to_parse(self, opened: Open, body: bytes, piece: int) -> None:
        async def test() -> None:
            async with opened.client() as client:
                said = head() + CHUNKED + body
                for begin in range(0, len(said), piece):
                    client.writer.write(said[begin : begin + piece])
                    await asyncio.sleep(0)
                answer = await client.answer()
                assert answer.status == 400
                assert "may have at most 512" in answer.message
                assert await client.is_ended()

        opened.run(test)

    def test_signed_chunks_and_a_few_trailers(self, opened: Open) -> None:
        async def test() -> None:
            async with opened.client() as client:
                signed = b"2;chunk-signature=" + b"a" * 64 + b"\r\n{}\r\n0\r\n" + b"x-trailer: 1\r\n" * 20 + b"\r\n"
                for _ in range(2):
                    assert (await client.ask(head() + CHUNKED + signed)).body == b"2"

        opened.run(test)

    def test_framing_counts_as_the_body(self, opened: Open) -> None:
        """A sixth of the limit in chunks of one byte is the limit."""

        async def test() -> None:
            async with opened.client() as client:
                answer = await client.ask(head() + CHUNKED + ONE_BYTE * (MOST_BYTES // len(ONE_BYTE) + 1000))
                assert answer.status == 413

        opened.run(test)


class TestEarlyAnswers:
    @pytest.mark.parametrize(
        ("asked", "status"),
        [
            (partial(head, token="wrong-wrong-wrong-wrong"), 401),
            (partial(head, path=b"/nowhere"), 404),
            (partial(head, method=b"GET"), 405),
            (partial(head, b"content-encoding: gzip"), 415),
            (partial(head, path=b"/health", method=b"HEAD"), 200),
        ],
    )
    def test_nothing_is_parsed_behind_them(
        self, opened: Open, parsed: Parsed, asked: Callable[[], bytes], status: int
    ) -> None:
        """The client can still send all that it has, and reads the answer behind it."""

        async def test() -> None:
            async with opened.client() as client:
                await client.say(asked() + CHUNKED + ONE_BYTE * 50_000)
                said = (await client.reader.read()).decode()
            assert said.startswith(f"HTTP/1.1 {status} ")
            assert "connection: close" in said
            assert said.count("HTTP/1.1") == 1
            assert parsed.events.total() <= 3 * MOST_EVENTS_OF_A_TURN

        opened.run(test, parsed)

    def test_a_large_body_can_be_sent_before_the_answer_is_read(self, opened: Open) -> None:
        async def test() -> None:
            async with opened.client() as client:
                await client.say(sized(b" " * (8 * MOST_BYTES)))
                answer = await client.answer()
                assert (answer.status, answer.headers["connection"]) == (413, "close")
                assert await client.is_ended()

        opened.run(test)

    def test_the_connection_stays_behind_a_small_body(self, opened: Open) -> None:
        async def test() -> None:
            async with opened.client() as client:
                asked = head(b"content-length: 60000", path=b"/nowhere") + b"\r\n"
                answer = await client.ask(asked)
                assert (answer.status, answer.headers.get("connection")) == (404, None)
                assert (await client.ask(b" " * 60_000 + sized(b"{}"))).body == b"2"
                answer = await client.ask(head(path=b"/nowhere") + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + sized(b"{}"))
                assert (answer.status, answer.headers.get("connection")) == (404, None)
                assert (await client.answer()).body == b"2"

        opened.run(test)

    def test_clients_that_await_leave_to_send(self, opened: Open) -> None:
        async def test() -> None:
            async with opened.client() as client:
                expecting = (b"content-length: 2", b"expect: 100-continue")
                await client.say(head(*expecting) + b"\r\n")
                assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                assert (await client.ask(b"{}")).body == b"2"
                answer = await client.ask(head(*expecting, path=b"/nowhere") + b"\r\n")
                assert (answer.status, answer.headers["connection"]) == (404, "close")

        opened.run(test)

    def test_one_that_falls_silent_is_not_waited_for(self, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.lingering.SILENT_SECONDS", 0.02)

        async def test() -> None:
            async with opened.client() as client:
                await client.say(head(path=b"/nowhere") + CHUNKED)
                await client.answer()
                assert await client.is_ended()
                await client.say_until_closed(b"1", pause=0.05)

        opened.run(test)

    @pytest.mark.parametrize("bound", ["LINGER_BYTES", "LINGER_SECONDS"])
    def test_nor_is_one_that_sends_for_ever(self, opened: Open, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
        monkeypatch.setattr(f"tandem.cluster.frontends.http.lingering.{bound}", 0)
        monkeypatch.setattr("tandem.cluster.frontends.http.lingering.SILENT_SECONDS", 0.02)

        async def test() -> None:
            async with opened.client() as client:
                await client.say(head(path=b"/nowhere") + CHUNKED)
                await client.say_until_closed(ONE_BYTE * 100)

        opened.run(test)
