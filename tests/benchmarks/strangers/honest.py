"""An honest client of a gateway: makes its calls one after another, over each frontend."""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tandem.cluster.client import AsyncClient
from tandem.cluster.tools.bench.event_streams import HttpConnections
from tandem.cluster.tools.bench.openai import COMPLETIONS
from tests.benchmarks.strangers.attacks import Target

PAUSE_SECONDS = 0.02
CALL_SECONDS = 20.0  # a call that takes longer counts as lost
PROMPT, NUM_TOKENS = [5, 6, 7], 4
CALLS = ("health", "http", "grpc")


@dataclass
class Seen:
    """Seconds of each call: of GET /health up to its end, of a stream over HTTP or gRPC up to its first token."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CALLS})
    lost: Counter[str] = field(default_factory=Counter)  # calls that failed, by their errors


class Honest:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._scheme = "http" if target.tls_ca is None else "https"
        self.seen = Seen()

    async def run(self, seconds: float) -> None:
        """Calls that are under way when the time is up count, with the time so far."""
        target = self._target
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(target.grpc, target.security))
            http = await stack.enter_async_context(aclosing(HttpConnections(self._url, target.token)))
            calls: tuple[Callable[[], Awaitable[float]], ...] = (
                lambda: self._health(http),
                lambda: self._over_http(http),
                lambda: self._over_grpc(client),
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*map(self._again_and_again, CALLS, calls))

    @property
    def _url(self) -> str:
        return f"{self._scheme}://{self._target.http}"

    async def _again_and_again(self, name: str, call: Callable[[], Awaitable[float]]) -> None:
        while True:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    self.seen.seconds[name].append(await call())
            except asyncio.CancelledError:
                self.seen.seconds[name].append(time.perf_counter() - began)
                raise
            except Exception as error:
                self.seen.lost[f"{name}: {type(error).__name__}: {error}"[:200]] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _health(self, http: HttpConnections) -> float:
        began = time.perf_counter()
        await http.call("GET", "/health", b"", None)
        return time.perf_counter() - began

    async def _over_http(self, http: HttpConnections) -> float:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        began, arrivals = time.perf_counter(), []
        await http.call("POST", COMPLETIONS, json.dumps(body).encode(), lambda _: arrivals.append(time.perf_counter()))
        return arrivals[0] - began

    async def _over_grpc(self, client: AsyncClient) -> float:
        began, arrivals = time.perf_counter(), []
        async for _ in client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True):
            arrivals.append(time.perf_counter())
        return arrivals[0] - began


def be_honest(pipe: Connection, target: Target) -> None:
    """Calls in a process of its own for as many seconds as it is asked to, and sends what it has Seen."""
    if target.tls_ca is not None:
        os.environ["SSL_CERT_FILE"] = target.tls_ca
    while (seconds := pipe.recv()) is not None:
        one = Honest(target)
        asyncio.run(one.run(seconds))
        pipe.send(one.seen)
