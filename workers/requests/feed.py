"""A step's tokens of many requests, on their way to the gateway in one message."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager

from tandem.proto import worker_pb2


class Feed:
    """Tokens that have gathered for one caller of Worker/Feed. Owned by the event loop."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._ready = asyncio.Event()

    def add(self, number: int, token_ids: Sequence[int]) -> None:
        """The next tokens of the request that has this number at the caller."""
        self._numbers += itertools.repeat(number, len(token_ids))
        self._token_ids += token_ids
        self._ready.set()

    async def messages(self) -> AsyncGenerator[worker_pb2.FedTokens]:
        """Each holds all tokens that came since the one before. They never end."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            message = worker_pb2.FedTokens(numbers=self._numbers, token_ids=self._token_ids)
            self._numbers, self._token_ids = [], []
            yield message


class Feeds:
    """The open feeds, by the numbers that their callers chose. Owned by the event loop."""

    def __init__(self) -> None:
        self._open: dict[int, Feed] = {}

    def get(self, number: int) -> Feed | None:
        return self._open.get(number)

    @contextmanager
    def opened(self, number: int) -> Generator[Feed | None]:
        """Opens the feed; None where it is open already."""
        if number in self._open:
            yield None
            return
        feed = self._open[number] = Feed()
        try:
            yield feed
        finally:
            del self._open[number]
