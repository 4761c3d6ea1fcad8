"""Processes that read long requests, their JSON, templates and texts, and compile grammars.

This work takes so long, and holds the interpreter so much, that streams would stall meanwhile. A process can also be
ended; a thread in a tokenizer cannot.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest, ProcessEnded, ServerError, StartFailed
from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.forks.forked_process import forked_by
from tandem.cluster.requests.reading.reader import Reader
from tandem.proto import inference_pb2
from tandem.workers.event_loop import unwatched
from tandem.workers.sampling.guided import Guided
from tandem.workers.service.turns import ClientTurns

T = TypeVar("T")
PROCESSES = 2  # of which one client has one
READ_SECONDS = 10.0  # for one request
START_SECONDS = 60.0  # for the fork server, whose imports take a second


class ReadTooSlow(Exception):
    """A process took more than READ_SECONDS, and was ended."""


class Readers:
    """Two processes, started when they are needed. A process that takes too long is ended and replaced.

    Owned by the event loop.
    """

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """folder: the checkpoint's. modules: the modules of the functions for run()."""
        self._folder = folder
        self._modules = (Reader.__module__, *modules)
        self._turns = ClientTurns(PROCESSES)
        self._threads = ThreadPoolExecutor(PROCESSES, "reader")  # which wait for pipes
        self._server: ForkServer | None = None
        self._idle: list[ForkedActor] = []
        self._closed = False

    def prepare(self) -> None:
        """Begins the imports in the fork server. Returns at once."""
        if self._server is None:
            self._server = ForkServer(self._modules, address=forked_by())

    async def tokens(self, client: str, message: inference_pb2.GenerateRequest, most: int | None = None) -> Int64Array:
        """Returns the ids of prompt_tokens(), or their last `most`. Waits and raises as run() does."""
        return await self._read(client, "tokens", message, most)

    async def texts(self, client: str, texts: Sequence[str], special: bool, most: int | None) -> list[Int64Array]:
        """Encodes texts as Tokenizer.encode_all() does. Waits and raises as run() does."""
        return await self._read(client, "texts", texts, special, most)

    async def run(self, client: str, function: Callable[..., T], *arguments: object) -> T:
        """Runs a module's function in the process; returns or raises as it does. All values travel between processes.

        Waits for its turn: clients take turns. Raises InvalidRequest after READ_SECONDS, and ServerError if the process
        ends.
        """
        return await self._read(client, "run", function, *arguments)

    async def check_guide(self, client: str, guided: Guided, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Calls Reader.check_guide(), and waits as run() does. Raises ReadTooSlow and ProcessEnded, too."""
        await self._ask(client, "check_guide", guided, vocab_size, eos_token_ids)

    async def _read(self, client: str, method: str, *arguments: object) -> Any:
        try:
            return await self._ask(client, method, *arguments)
        except ReadTooSlow:
            raise InvalidRequest(
                f"the request takes more than {READ_SECONDS:g} s to read and to tokenize; send a shorter one, or "
                "token ids"
            ) from None
        except ProcessEnded as error:
            raise ServerError(f"the request could not be read: {error}") from error

    async def _ask(self, client: str, method: str, *arguments: object) -> Any:
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._turns.turn(client))
            # The process reads on when the caller is cancelled, and keeps its place until it ends.
            reading = unwatched(asyncio.ensure_future(self._call(turn.pop_all(), method, *arguments)))
        return await asyncio.shield(reading)

    async def _call(self, turn: AsyncExitStack, method: str, *arguments: object) -> Any:
        async with turn:
            loop = asyncio.get_running_loop()
            reader = await loop.run_in_executor(self._threads, self._take)
            healthy = True
            try:
                async with asyncio.timeout(READ_SECONDS):
                    calling = loop.run_in_executor(self._threads, partial(reader.call, method, *arguments))
                    # Nobody else may cancel it: the process answers it when it ends.
                    return await asyncio.shield(unwatched(asyncio.wrap_future(await calling)))
            except TimeoutError:
                healthy = False
                raise ReadTooSlow from None
            except asyncio.CancelledError:
                healthy = False
                raise
            finally:
                if healthy and not self._closed:
                    self._idle.append(reader)
                else:
                    reader.kill()

    def _take(self) -> ForkedActor:
        """Returns an idle process, or a new one. Runs in a thread, because it may wait for the server's imports."""
        while self._idle:
            reader = self._idle.pop()
            if not reader.ended:
                return reader
        self.prepare()
        assert self._server is not None, "prepare() has made it"
        try:
            reader = self._server.fork("reader", pack((Reader, self._folder)), START_SECONDS)
            reader.call("ready").result(START_SECONDS)
            return reader
        except (StartFailed, ProcessEnded, TimeoutError) as error:
            self._server.close()
            self._server = None
            raise ServerError(f"the request could not be read: {error}") from error

    async def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._closed = True
        for reader in self._idle:
            reader.kill()
        self._idle.clear()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        self._threads.shutdown(wait=False, cancel_futures=True)
