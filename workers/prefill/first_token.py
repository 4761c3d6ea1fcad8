"""What a prefill worker draws at the end of a prompt, and its way to whoever announced the prompt."""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass

from tandem.workers.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class FirstToken:
    token_id: int
    logprobs: TokenLogprobs | None


class FirstTokens:
    """Those of the prompts that came over one stream, by request id, in the order in which they are drawn."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._drawn: asyncio.Queue[tuple[str, FirstToken]] = asyncio.Queue()

    def expect(self, request_id: str, future: "Future[FirstToken]") -> None:
        """From any thread. A future that never ends costs nothing."""
        future.add_done_callback(
            lambda done: self._event_loop.call_soon_threadsafe(self._drawn.put_nowait, (request_id, done.result()))
        )

    async def next(self) -> tuple[str, FirstToken]:
        """On the event loop."""
        return await self._drawn.get()
