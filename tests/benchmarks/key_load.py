"""Clients with keys that send far more than their limits allow, in a process of their own: an open loop.

main() reads a Storm as JSON from stdin, prints `begun`, and at its end prints what came of each stream as JSON.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from tandem.cluster.protocol import build_request
from tandem.proto import inference_pb2_grpc

REQUEST_SECONDS = 60.0
MOST_IN_FLIGHT = 64  # of a stream; more are not sent, and count as skipped
IDLE_SECONDS = 20.0  # of a connection: the gateway closes it after 60
CONNECTIONS = 4  # of a stream, so that each gateway process has some
GRPC, HTTP = "grpc", "http"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LIMITED = {"RESOURCE_EXHAUSTED", "429"}
LOST = {"UNAVAILABLE", "CANCELLED", "connection"}  # with the gateway process that had it


@dataclass(frozen=True)
class Stream:
    """What is sent with one key through one frontend. rate: requests a second. max_tokens: None sends chats without a
    length, over HTTP."""

    name: str
    key: str
    frontend: str
    rate: float
    prompt: int = 8
    max_tokens: int | None = 4
    n: int = 1


@dataclass(frozen=True)
class Storm:
    """addresses: HOST:PORT of gateways by frontend. ca: a PEM file, for TLS."""

    seconds: float
    grpc: list[str]
    http: list[str]
    streams: list[Stream]
    ca: str | None = None


@dataclass
class Outcome:
    """Of one stream. passed: for each request that was served when it was sent and had ended, by the monotonic clock
    that all processes of a machine share, and the tokens of its usage."""

    name: str
    passed: list[tuple[float, float, int]] = field(default_factory=list)
    limited: int = 0
    lost: int = 0
    skipped: int = 0
    others: dict[str, int] = field(default_factory=dict)  # by code
    retry_after: list[int] = field(default_factory=list)  # the least and the most, in seconds

    @property
    def sent(self) -> int:
        return len(self.passed) + self.limited + self.lost + sum(self.others.values())

    def limit(self, retry_after: str | None) -> None:
        self.limited += 1
        if retry_after is not None:
            seconds = int(retry_after)
            self.retry_after = [min([seconds, *self.retry_after]), max([seconds, *self.retry_after])]


Answer = tuple[str, int, str | None]  # a code, "" where it was served; tokens; retry-after
Send = Callable[[list[int]], Awaitable[Answer]]


async def run(storm: Storm) -> list[Outcome]:
    """Sends all streams at once."""
    return list(await asyncio.gather(*(_stream(storm, seed, one) for seed, one in enumerate(storm.streams))))


async def _stream(storm: Storm, seed: int, stream: Stream) -> Outcome:
    draw, outcome = random.Random(seed), Outcome(stream.name)
    clients = _grpc_clients(storm, stream) if stream.frontend == GRPC else _http_clients(storm, stream)
    under_way: set[asyncio.Task[None]] = set()
    end = due = time.monotonic()
    end += storm.seconds
    number = 0
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due += draw.expovariate(stream.rate)
        if len(under_way) >= MOST_IN_FLIGHT:
            outcome.skipped += 1
            continue
        prompt = draw.choices(range(10, 200), k=stream.prompt)
        one = asyncio.create_task(_one(clients[number % len(clients)], prompt, outcome))
        number += 1
        under_way.add(one)
        one.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way, timeout=REQUEST_SECONDS)
    return outcome


async def _one(send: Send, prompt: list[int], outcome: Outcome) -> None:
    sent = time.monotonic()
    code, tokens, retry_after = await send(prompt)
    if not code:
        outcome.passed.append((sent, time.monotonic(), tokens))
    elif code in LIMITED:
        outcome.limit(retry_after)
    elif code in LOST:
        outcome.lost += 1
    else:
        outcome.others[code] = outcome.others.get(code, 0) + 1


def _grpc_clients(storm: Storm, stream: Stream) -> list[Send]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]
    authority = None if storm.ca is None else grpc.ssl_channel_credentials(Path(storm.ca).read_bytes())

    def client(address: str) -> Send:
        channel = (
            grpc.aio.insecure_channel(address, options=options)
            if authority is None
            else grpc.aio.secure_channel(address, authority, options=options)
        )
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def send(prompt: list[int]) -> Answer:
            sampling: Any = {"temperature": 0, "ignore_eos": True, "n": stream.n, "max_tokens": stream.max_tokens}
            call = stub.Generate(
                build_request(prompt, sampling, None),
                timeout=REQUEST_SECONDS,
                metadata=[("authorization", f"Bearer {stream.key}")],
            )
            tokens = 0
            try:
                async for message in call:
                    if message.HasField("usage"):
                        tokens = message.usage.prompt_tokens + message.usage.output_tokens
            except grpc.aio.AioRpcError as error:
                trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
                return error.code().name, 0, _seconds(trailers.get("retry-after-ms"))
            return "", tokens, None

        return send

    return [client(address) for address in storm.grpc for _ in range(CONNECTIONS)]


def _seconds(milliseconds: str | None) -> str | None:
    return None if milliseconds is None else str(int(milliseconds) // 1000)


def _http_clients(storm: Storm, stream: Stream) -> list[Send]:
    pools = [_Pool(*address.rsplit(":", 1)) for address in storm.http]

    def client(pool: _Pool) -> Send:
        async def send(prompt: list[int]) -> Answer:
            asked: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "n": stream.n}
            if stream.max_tokens is None:
                asked |= {"messages": [{"role": "user", "content": f"{prompt[0]}"}]}
            else:
                asked |= {"prompt": prompt, "max_tokens": stream.max_tokens}
            path = CHATS if stream.max_tokens is None else COMPLETIONS
            try:
                status, headers, body = await asyncio.wait_for(pool.post(path, stream.key, asked), REQUEST_SECONDS)
            except (OSError, EOFError, ValueError, TimeoutError):
                return "connection", 0, None
            tokens = json.loads(body)["usage"]["total_tokens"] if status == "200" else 0
            return "" if status == "200" else status, tokens, headers.get("retry-after")

        return send

    return [client(pool) for pool in pools for _ in range(CONNECTIONS)]


class _Pool:
    """Connections to one HTTP server that are kept while nobody uses them."""

    def __init__(self, host: str, port: str) -> None:
        self._host, self._port = host, int(port)
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []  # since when

    async def post(self, path: str, key: str, body: dict[str, Any]) -> tuple[str, dict[str, str], bytes]:
        """Status, headers and body. OSError or EOFError where the connection ends."""
        while self._idle and time.monotonic() - self._idle[0][0] > IDLE_SECONDS:
            self._idle.pop(0)[2].close()
        if self._idle:
            _, reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
            }
            answer = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection", "") == "close":
            writer.close()
        else:
            self._idle.append((time.monotonic(), reader, writer))
        return first.split(" ")[1], headers, answer


def main() -> None:
    """See the module."""
    asked = json.load(sys.stdin)
    storm = Storm(**asked | {"streams": [Stream(**one) for one in asked["streams"]]})
    print("begun", flush=True)
    with suppress(KeyboardInterrupt):
        print(json.dumps([asdict(one) for one in asyncio.run(run(storm))]), flush=True)
