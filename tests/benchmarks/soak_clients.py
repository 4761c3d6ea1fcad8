"""The honest clients of `tests/benchmarks/soak.py`: calls of all kinds at a modest rate, over HTTP and gRPC."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tandem.cluster.client import AsyncClient
from tandem.cluster.tools.bench.event_streams import HttpConnections
from tests.benchmarks.strangers.attacks import Target

LANES = 8  # calls at a time, at most
CALL_SECONDS = 60.0  # a call that takes longer counts as lost
LONGEST_PROMPT, LONGEST_OUTPUT = 200, 48
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m", "l"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
USER = [{"role": "user", "content": "How many?"}]


@dataclass
class Calls:
    """The outcomes of the calls, by their kinds."""

    done: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)  # with their errors


def _ignored(event: object) -> None:
    """Ignores an event of a stream that is read to its end."""


class SoakClients:
    """Draws one kind after another, each with lengths of its own. Owned by one event loop."""

    def __init__(self, target: Target, rate: float, seed: int) -> None:
        """rate: calls begun a second, where calls are short."""
        self._target = target
        self._pause = LANES / rate
        self._chance = random.Random(seed)
        self.calls = Calls()

    async def run(self, seconds: float) -> None:
        """Calls under way when the time is up come to their ends."""
        target, loop = self._target, asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._grpc = await stack.enter_async_context(AsyncClient(target.grpc, target.security))
            self._http = await stack.enter_async_context(
                aclosing(HttpConnections(f"http://{target.http}", target.token))
            )
            ends = loop.time() + seconds
            await asyncio.gather(*(self._lane(ends) for _ in range(LANES)))

    async def _lane(self, ends: float) -> None:
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "http_whole": self._whole,
            "http_stream": self._stream,
            "http_cancelled": self._cancelled,
            "http_guided": self._guided,
            "http_tools": self._tools,
            "http_logprobs": self._logprobs,
            "grpc_stream": self._over_grpc,
            "grpc_cancelled": self._cancelled_over_grpc,
            "grpc_guided": lambda: self._over_grpc(guided={"regex": "[a-z]{2,40}"}),
            "grpc_logprobs": lambda: self._over_grpc(logprobs=3),
        }
        loop = asyncio.get_running_loop()
        while (left := ends - loop.time()) > 0:
            await asyncio.sleep(min(left, self._chance.expovariate(1 / self._pause)))
            kind = self._chance.choice(list(kinds))
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await kinds[kind]()
                self.calls.done[kind] += 1
            except Exception as error:
                self.calls.lost[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1

    @property
    def _asked(self) -> dict[str, Any]:
        """A prompt and an output of any length."""
        prompt = [self._chance.randrange(5, 500) for _ in range(self._chance.randint(1, LONGEST_PROMPT))]
        return {"prompt": prompt, "max_tokens": self._chance.randint(1, LONGEST_OUTPUT), "ignore_eos": True}

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await self._http.call("POST", path, json.dumps(body).encode(), _ignored if body.get("stream") else None)

    async def _whole(self) -> None:
        await self._post(COMPLETIONS, self._asked)

    async def _stream(self) -> None:
        await self._post(COMPLETIONS, self._asked | {"stream": True})

    async def _cancelled(self) -> None:
        """Goes away behind the third event, and its connection ends."""
        seen, enough = itertools.count(1), asyncio.Event()
        body = self._asked | {"stream": True, "max_tokens": LONGEST_OUTPUT}
        async with aclosing(HttpConnections(f"http://{self._target.http}", self._target.token)) as http:
            data = json.dumps(body).encode()
            call = asyncio.ensure_future(
                http.call("POST", COMPLETIONS, data, lambda _: enough.set() if next(seen) == 3 else None)
            )
            waiting = asyncio.ensure_future(enough.wait())
            await asyncio.wait([call, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if call.done():
                call.result()
            call.cancel()
            await asyncio.wait([call])

    async def _guided(self) -> None:
        schema = {"name": "order", "schema": SCHEMA}
        form = {"type": "json_schema", "json_schema": schema}
        await self._post(CHATS, {"messages": USER, "response_format": form, "max_tokens": LONGEST_OUTPUT})

    async def _tools(self) -> None:
        body = {"messages": USER, "tools": [TOOL], "tool_choice": "required", "max_tokens": LONGEST_OUTPUT}
        await self._post(CHATS, body | {"stream": self._chance.random() < 0.5})

    async def _logprobs(self) -> None:
        await self._post(COMPLETIONS, self._asked | {"logprobs": 3, "stream": self._chance.random() < 0.5})

    async def _over_grpc(self, **options: Any) -> None:
        asked: dict[str, Any] = self._asked | options
        if "guided" in options:
            del asked["ignore_eos"]
        async for _ in self._grpc.generate(asked.pop("prompt"), **asked):
            pass

    async def _cancelled_over_grpc(self) -> None:
        asked: dict[str, Any] = self._asked | {"max_tokens": LONGEST_OUTPUT}
        async with aclosing(self._grpc.generate(asked.pop("prompt"), **asked)) as stream:
            async for _ in stream:
                return


def soak(pipe: Connection, target: Target, rate: float, seed: int) -> None:
    """Calls in a process of its own for as many seconds as it is told to, and sends its Calls."""
    while (seconds := pipe.recv()) is not None:
        clients = SoakClients(target, rate, seed)
        asyncio.run(clients.run(seconds))
        pipe.send(clients.calls)
