"""One request of a storm through the HTTP server, whose clients do not resume what the end of a gateway breaks off."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.http_client import COMPLETIONS


@dataclass
class HttpStream:
    """One stream. begun: the server has answered. ended: with [DONE]. broken: with its connection, or not begun. error:
    the server's error. retry_after_seconds: it was refused for so long."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    begun: bool = False
    ended: bool = False
    broken: bool = False
    error: str = ""
    retry_after_seconds: float | None = None

    async def receive(self, client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> None:
        """Goes away after leave_after tokens if that is not None."""
        try:
            async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
                self.begun = True
                if response.status_code == 429:
                    self.retry_after_seconds = int(response.headers["retry-after-ms"]) / 1000
                    return
                if response.status_code != 200:
                    self.error = (await response.aread()).decode()
                    return
                async for line in response.aiter_lines():
                    self._add(line)
                    if leave_after is not None and len(self.tokens) > leave_after:
                        return
        except httpx.TransportError:
            self.broken = not self.ended

    def _add(self, line: str) -> None:
        if line == "data: [DONE]":
            self.ended = True
        elif line:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = str(event)
                return
            (choice,) = event["choices"]
            self.tokens += choice["token_ids"]
            self.text += choice["text"]
