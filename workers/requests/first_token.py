"""The token sampled after a prompt, and its way to the gateway that announced the prompt."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.workers.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class FirstToken:
    token_id: int
    logprobs: TokenLogprobs | None


class FirstTokens:
    """First tokens of the prompts that one Announce call brought, in the order in which they are sampled."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._sampled: asyncio.Queue[tuple[str, FirstToken]] = asyncio.Queue()

    def expect(self, request_id: str, future: "Future[FirstToken]") -> None:
        """Notes a future; any thread may call it. A future that never ends costs nothing."""
        future.add_done_callback(
            lambda done: self._event_loop.call_soon_threadsafe(self._sampled.put_nowait, (request_id, done.result()))
        )

    async def next(self) -> tuple[str, FirstToken]:
        """Waits for the next first token, on the event loop."""
        return await self._sampled.get()
