"""CPU time of a token in a gateway process, once all streams run. Prints JSON.

A gateway in a process of its own, between clients in another and a worker that computes nothing and gives all its
streams a token so many times a second. Ways in turns; of each, medians over the rounds:

    loop_us, process_us    CPU time of the gateway a token: of its event loop's thread, of all its threads
    worker_us              the same of the worker's event loop, from its feed's lists to the message that is sent
    tokens_s               tokens a second that the worker gave
    tokens_a_message       more than one where the gateway does not keep up

No request begins or ends meanwhile. `frontends` has those costs, too, and times.
"""

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tandem.cluster.client import AsyncClient
from tandem.cluster.gateway.settings import GatewayAddresses
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.event_loop import EventLoopThread
from tests.benchmarks.frontends import (
    CALL_SECONDS,
    MAX_MODEL_LEN,
    Spent,
    SteppingWorker,
    one_gateway,
    process_of,
    serve_gateway,
)
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import print_result

WAYS = ("completions", "chats", "grpc")
PROMPT = list(range(16, 32))
TOKENS = range(300, 363)  # of different texts
SETTLE_SECONDS = 1.0
GRPC_CONNECTIONS = 32
HEAD = "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"


class Reader(asyncio.Protocol):
    """One HTTP call, of whose answer only the events are counted."""

    def __init__(self, path: str, body: dict[str, object]) -> None:
        content = json.dumps(body).encode()
        self._request = HEAD.format(path=path, length=len(content)).encode() + content
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")


class Streams:
    """Calls of one way that run until close()."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._readers: list[Reader] = []
        self._counts: list[int] = []

    async def open(self, way: str, addresses: GatewayAddresses, streams: int) -> None:
        """Returns when each has had a message."""
        if way == "grpc":
            await self._open_grpc(addresses.grpc, streams)
        else:
            await self._open_http(way, addresses.http or "", streams)
        while min([reader.events for reader in self._readers] + self._counts) == 0:
            await asyncio.sleep(0.05)

    async def _open_http(self, way: str, address: str, streams: int) -> None:
        chat = way == "chats"
        asked = {"messages": [{"role": "user", "content": "Hello."}]} if chat else {"prompt": PROMPT}
        body = {**asked, "max_tokens": MAX_MODEL_LEN - 64, "temperature": 0, "ignore_eos": True, "stream": True}
        host, _, port = address.rpartition(":")
        for _ in range(streams):
            _, reader = await asyncio.get_running_loop().create_connection(
                lambda: Reader("/v1/chat/completions" if chat else "/v1/completions", body), host, int(port)
            )
            self._stack.callback(reader.transport.abort)
            self._readers.append(reader)

    async def _open_grpc(self, address: str, streams: int) -> None:
        clients = [await self._stack.enter_async_context(AsyncClient(address)) for _ in range(GRPC_CONNECTIONS)]
        self._counts = [0] * streams
        calls = [asyncio.create_task(self._read(index, clients[index % len(clients)])) for index in range(streams)]
        for call in calls:
            self._stack.callback(call.cancel)

    async def _read(self, index: int, client: AsyncClient) -> None:
        with suppress(asyncio.CancelledError):
            async for _ in client.generate(PROMPT, max_tokens=MAX_MODEL_LEN - 64, temperature=0, ignore_eos=True):
                self._counts[index] += 1

    async def messages(self) -> int:
        return sum(self._counts) + sum(reader.events for reader in self._readers)

    async def close(self) -> None:
        await self._stack.aclose()


def serve_clients(pipe: Connection, way: str, addresses: GatewayAddresses, streams: int) -> None:
    """Serves in a process of its own: says that all streams run, then how many messages have come as often as asked."""
    events, clients = EventLoopThread("clients"), Streams()
    events.run(clients.open(way, addresses, streams), CALL_SECONDS)
    pipe.send(True)
    while pipe.recv():
        pipe.send(events.run(clients.messages(), CALL_SECONDS))
    events.run(clients.close(), CALL_SECONDS)
    events.stop()


def serve_worker(pipe: Connection, steps_a_second: float) -> None:
    """Serves in a process of its own: sends its island, then its tokens and its CPU time so far as often as asked."""
    events = EventLoopThread("worker")
    worker = SteppingWorker(lambda _: 7, steps_a_second=steps_a_second, tokens=itertools.cycle(TOKENS))
    events.run(worker.start(), CALL_SECONDS)
    ticking = events.run(_begun(worker.run()), CALL_SECONDS)
    pipe.send(worker.state("i", epoch=1, version=1))
    while pipe.recv():
        pipe.send((worker.given, time.process_time()))
    ticking.cancel()
    events.run(worker.stop(), CALL_SECONDS)
    events.stop()


async def _begun(work: Any) -> "asyncio.Task[None]":
    return asyncio.create_task(work)


@dataclass(frozen=True)
class Counts:
    """So far: of the gateway, of the worker, of the clients."""

    spent: Spent
    given: tuple[int, float]
    messages: int

    @classmethod
    def of(cls, *pipes: Connection) -> Self:
        for pipe in pipes:
            pipe.send(True)
        return cls(*(pipe.recv() for pipe in pipes))


def one_round(
    way: str, streams: int, seconds: float, addresses: GatewayAddresses, gateway: Connection, worker: Connection
) -> dict[str, float]:
    with process_of(serve_clients, way, addresses, streams) as clients:
        clients.recv()
        time.sleep(SETTLE_SECONDS)
        before, began = Counts.of(gateway, worker, clients), time.perf_counter()
        time.sleep(seconds)
        after, took = Counts.of(gateway, worker, clients), time.perf_counter() - began
    tokens = after.given[0] - before.given[0]
    return {
        "loop_us": (after.spent.loop - before.spent.loop) / tokens * 1e6,
        "process_us": (after.spent.process - before.spent.process) / tokens * 1e6,
        "worker_us": (after.given[1] - before.given[1]) / tokens * 1e6,
        "tokens_s": tokens / took,
        "tokens_a_message": tokens / (after.messages - before.messages),
    }


def measure(
    ways: Sequence[str], streams: int, steps: float, seconds: float, rounds: int, budget: Budget
) -> dict[str, dict[str, float]]:
    """Per way the medians over the rounds."""
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        with (
            process_of(serve_worker, steps) as worker,
            process_of(serve_gateway, one_gateway(folder), worker.recv()) as gateway,
        ):
            addresses = gateway.recv()
            with process_of(serve_clients, "grpc", addresses, 1) as first:
                first.recv()  # a feed is open now
            for _ in budget.within(range(rounds)):
                for way, row in rows.items():
                    row.append(one_round(way, streams, seconds, addresses, gateway, worker))
    return {way: {name: Measured.median(one[name] for one in row) for name in row[0]} for way, row in rows.items()}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--ways", default=WAYS, choices=WAYS)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=float, default=10.0, help="tokens a second of each stream")
    parser.add_argument("--window", type=float, default=5.0, help="seconds that are measured")
    parser.add_argument("--rounds", type=int, default=3)
    add_seconds(parser)
    given = parser.parse_args()
    measured = measure(given.ways, given.streams, given.steps, given.window, given.rounds, Budget(given.seconds))
    print_result({"case": f"{given.streams} streams", "steps_a_second": given.steps, **measured}, given)


if __name__ == "__main__":
    main()
