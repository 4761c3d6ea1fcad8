"""Requests that come through the HTTP server at once: their turns."""

import asyncio
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.frontends.http.reply import Reply
from tandem.cluster.frontends.openai.completions import CompletionBody, completion_answer
from tandem.cluster.frontends.openai.generation_route import GenerationRoute
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.reading.readers import Readers
from tandem.proto import inference_pb2
from tests.cluster.open_gateway import PROMPT

A_ROUND = 4
BODY = json.dumps({"prompt": PROMPT, "stream": True}).encode()
SCOPE: dict[str, Any] = {"headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1)}


class RoundedRequests:
    """Answers each request with one message; counts them by the rounds of the event loop that they come in."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self._round = 0

    def look(self) -> None:
        self._round += 1
        asyncio.get_running_loop().call_soon(self.look)

    async def serve(self, request: Any, client: str, write: Any, **_: Any) -> None:
        self.requests[self._round] += 1
        await write(inference_pb2.GenerateResponse(request_id="r"))


def test_so_many_a_round() -> None:
    async def crowd(requests: Any, size: int) -> list[bytes]:
        bodies, readers = BodyBudget(1 << 20, 1 << 20), Readers(Path(), ())
        turns = FairTurns(A_ROUND)
        route = GenerationRoute(
            CompletionBody,
            partial(completion_answer, None),
            requests,
            ServedNames(["m"]),
            1 << 20,
            1 << 10,
            turns,
            bodies,
            readers,
        )
        requests.look()
        return await asyncio.gather(*(one(route) for _ in range(size)))

    async def one(route: GenerationRoute) -> bytes:
        body = iter([{"type": "http.request", "body": BODY, "more_body": False}])
        said: list[bytes] = []

        async def receive() -> Any:
            return next(body, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            said.append(message.get("body", b""))

        await route.serve(SCOPE, receive, Reply(send))
        return b"".join(said)

    requests = RoundedRequests()
    answers = asyncio.run(crowd(requests, 5 * A_ROUND))
    assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
    assert set(requests.requests.values()) == {A_ROUND}
