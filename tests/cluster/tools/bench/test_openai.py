"""The load generator's HTTP client, against servers that answer byte for byte as told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Self

import pytest

from tandem.cluster.tools.bench.open_target import open_target
from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.targets import Refused, Served, TargetSpec
from tandem.cluster.tools.bench.timeline import Running

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
PROMPT = [Message("user", [11, 12])]
Write = Callable[[bytes], None]
Answer = Callable[[bytes, Write], Awaitable[None]]  # takes a request's body


def event(**held: Any) -> bytes:
    return b"data: " + json.dumps(held).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = event(choices=[{"index": 0, "text": "a"}])
USAGE = event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 7, "prompt_tokens_details": None})
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


class Scripted:
    """A server at `url`; `answer` writes what each request gets. connections: how many came."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await self._answer(await reader.readexactly(int(length.split(b":")[1])), writer.write)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def asked(answer: Answer, count: int = 1, **options: Any) -> tuple[list[Running], int]:
    """Sends `count` requests one after the other. Returns what came of them, and over how many connections."""

    async def ask() -> tuple[list[Running], int]:
        async with (
            Scripted(answer) as server,
            aclosing(open_target(TargetSpec(urls=(server.url,), model="m", **options))) as target,
        ):
            told = []
            for _ in range(count):
                told.append(Running(7, 0.0))
                await target.stream(PROMPT, told[-1], timeout=10)
            return told, server.connections

    return asyncio.run(ask())


def saying(*parts: bytes) -> Answer:
    async def answer(body: bytes, write: Write) -> None:
        for part in parts:
            write(part)
            await asyncio.sleep(0.002)

    return answer


WHOLE = CHUNKED + chunk(TOKEN) + chunk(TOKEN + TOKEN) + chunk(USAGE + DONE) + LAST


@pytest.mark.parametrize(
    "parts",
    [
        [WHOLE],
        [WHOLE[at : at + 1] for at in range(len(WHOLE))],
        [CHUNKED, *(chunk(part) for part in (TOKEN[:9], TOKEN[9:] + TOKEN, TOKEN + USAGE, DONE)), LAST],
        [CHUNKED, *(chunk(part.replace(b"\n", b"\r\n")) for part in (TOKEN, TOKEN, TOKEN, USAGE + DONE)), LAST],
    ],
    ids=["whole", "byte by byte", "other chunks", "CRLF"],
)
def test_a_stream_in_any_pieces(parts: list[bytes]) -> None:
    (told,), _ = asked(saying(*parts))
    assert len(told.arrivals) == 3
    assert list(told.arrivals) == sorted(told.arrivals)
    assert told.arrivals[0] >= told.sent > 0
    assert (told.prompt_tokens, told.output_tokens, told.cached_tokens) == (2, 7, 0)


def test_an_answer_that_ends_with_its_connection() -> None:
    async def answer(body: bytes, write: Write) -> None:
        write(OK + b"connection: close\r\n\r\n" + TOKEN + DONE)
        raise ConnectionError

    (told,), connections = asked(answer)
    assert (len(told.arrivals), told.output_tokens, connections) == (1, 1, 1)  # without usage a message is a token


def test_connections_are_used_again() -> None:
    told, connections = asked(saying(WHOLE), count=3)
    assert [len(each.arrivals) for each in told] == [3, 3, 3]
    assert connections == 1


def test_a_chunk_that_only_names_the_role_is_no_token() -> None:
    chunks = [event(choices=[{"delta": delta}]) for delta in ({"role": "assistant", "content": ""}, {"content": "a"})]
    (told,), _ = asked(saying(CHUNKED, *map(chunk, chunks), chunk(DONE), LAST), endpoint="chat")
    assert len(told.arrivals) == 1


def test_what_is_asked_for() -> None:
    bodies = []

    async def answer(body: bytes, write: Write) -> None:
        bodies.append(json.loads(body))
        write(WHOLE)

    asked(answer, salt="s")
    asked(answer, endpoint="chat")
    assert (bodies[0]["prompt"], bodies[0]["max_tokens"], bodies[0]["cache_salt"]) == ([11, 12], 7, "s")
    assert (bodies[0]["ignore_eos"], bodies[0]["stream"], bodies[0]["model"]) == (True, True, "m")
    assert [message["role"] for message in bodies[1]["messages"]] == ["user"]
    assert len(bodies[1]["messages"][0]["content"].split()) == 2


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull"], "status 429: b'full'"),
        ([CHUNKED, chunk(TOKEN + event(error={"message": "lost"})), LAST], "the stream ends with {'message': 'lost'}"),
        ([CHUNKED, chunk(b"data: x\n\n"), LAST], "an event that is none"),
        ([CHUNKED, chunk(TOKEN), LAST], r"the stream ended without \[DONE\]"),
        ([b"SSH-2.0\r\n\r\n"], "no HTTP"),
    ],
)
def test_failures_are_told(parts: list[bytes], told: str) -> None:
    with pytest.raises(Refused, match=told):
        asked(saying(*parts))


def test_a_connection_that_breaks() -> None:
    async def answer(body: bytes, write: Write) -> None:
        write(CHUNKED + chunk(TOKEN))
        raise ConnectionError

    with pytest.raises(Refused, match=r"closed|without|HTTP"):
        asked(answer)


def test_servers_of_one_model_share_the_requests() -> None:
    def models(*names: str) -> Answer:
        held = json.dumps({"data": [{"id": name, "max_model_len": 10 * len(names)} for name in names]}).encode()
        return saying(OK + b"content-length: %d\r\n\r\n" % len(held) + held)

    async def ask(model: str) -> Served:
        async with Scripted(models("a", "b")) as one, Scripted(models("b", "c", "d")) as other:
            async with aclosing(open_target(TargetSpec(urls=(one.url, other.url), model=model))) as target:
                served = await target.served()
            assert (one.connections, other.connections) == (1, 1)
            return served

    assert asyncio.run(ask("b")) == Served("b", None, 20)
    with pytest.raises(Refused, match=r"different models, \['a', 'b'\]"):
        asyncio.run(ask(""))
    with pytest.raises(Refused, match=r"--model-name is 'a'; \['b', 'c', 'd'\] are served"):
        asyncio.run(ask("a"))


def test_what_was_drafted_is_in_the_usage_and_what_is_asked_for_in_the_request() -> None:
    bodies: list[dict] = []
    details = b'"completion_tokens_details": {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}, '
    said = CHUNKED + chunk(TOKEN + USAGE.replace(b'"usage": {', b'"usage": {' + details) + DONE) + LAST

    async def answer(body: bytes, write: Write) -> None:
        bodies.append(json.loads(body))
        write(said)

    (told,), _ = asked(answer, temperature=0.5, first_token_seconds=0.4)
    assert (told.drafted_tokens, told.accepted_tokens) == (6, 4)
    assert (bodies[0]["temperature"], bodies[0]["first_token_seconds"]) == (0.5, 0.4)
