"""The stream of announcements to one worker: what comes back over it, however it comes."""

import asyncio
from collections.abc import AsyncIterator

from tandem.cluster.routing.prefill_hints import PrefillHints
from tandem.proto import worker_pb2


class Announced:
    """A stub and its call at once: takes any announcement, and tells these first tokens one right after another."""

    def __init__(self, *tokens: tuple[str, int]) -> None:
        self._tokens = tokens

    def Announce(self, timeout: float) -> "Announced":
        return self

    def done(self) -> bool:
        return False

    async def write(self, request: worker_pb2.AnnounceRequest) -> None:
        return

    async def __aiter__(self) -> AsyncIterator[worker_pb2.FirstToken]:
        for request_id, token_id in self._tokens:
            yield worker_pb2.FirstToken(request_id=request_id, token_id=token_id)


def test_what_is_told_twice_or_in_vain_keeps_nobody_from_its_token() -> None:
    async def announced() -> tuple[int, int, bool]:
        announcements = PrefillHints(Announced(("a", 1), ("gone", 2), ("a", 1), ("unknown", 3), ("b", 4)))  # type: ignore[arg-type]
        gone, first, second = (announcements.expect(name) for name in ("gone", "a", "b"))
        await announcements.send(worker_pb2.AnnounceRequest(request_id="a"))
        gone.cancel()
        async with asyncio.timeout(10):
            tokens = (await first).token_id, (await second).token_id
        await announcements.close()
        return *tokens, gone.cancelled()

    assert asyncio.run(announced()) == (1, 4, True)
