"""Processes that read long requests: one that is too slow, or that ends, is replaced."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tandem.cluster.errors import InvalidRequest, ServerError
from tandem.cluster.gateway.settings import READ_BY
from tandem.cluster.requests.reading import readers as module
from tandem.cluster.requests.reading.reader import Reader
from tandem.cluster.requests.reading.readers import Readers
from tandem.proto import inference_pb2
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("readers"))


@asynccontextmanager
async def open_readers(model: Path) -> AsyncIterator[Readers]:
    readers = Readers(model, ())
    try:
        yield readers
    finally:
        await readers.close()


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_slow_one_is_ended_and_nothing_else_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with open_readers(model) as readers:
            pid = await readers.run("a", os.getpid)
            assert pid != os.getpid()
            monkeypatch.setattr(module, "READ_SECONDS", 0.5)
            slow = asyncio.ensure_future(readers.run("slow", time.sleep, 600))
            await asyncio.sleep(0)
            assert await readers.run("other", len, "beside it") == 9
            with pytest.raises(
                InvalidRequest, match=r"takes more than 0\.5 s to read and to tokenize; send a shorter one"
            ):
                await slow
            monkeypatch.setattr(module, "READ_SECONDS", 60.0)
            assert await readers.run("slow", len, "behind it") == 9
            message = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[3, 1, 2]))
            assert (await readers.tokens("a", message)).tolist() == [3, 1, 2]
            deadline = time.monotonic() + 30
            while is_alive(pid):
                assert time.monotonic() < deadline, "the slow process goes on"
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_one_that_ends(model: Path) -> None:
    async def run() -> None:
        async with open_readers(model) as readers:
            pid = await readers.run("a", os.getpid)
            with pytest.raises(ServerError, match="could not be read: reader ended: its process was ended by SIGKILL"):
                await readers.run("a", os.kill, pid, signal.SIGKILL)
            assert await readers.run("a", len, "x") == 1
            server = readers._server
            assert server is not None
            os.kill(server.pid, signal.SIGKILL)  # what it has forked lives on
            pid = await readers.run("a", os.getpid)
            assert await readers.run("a", len, "xy") == 2
            assert await readers.run("a", os.getpid) == pid
            with pytest.raises(ServerError, match="reader ended: its process"):
                await readers.run("a", os.kill, pid, signal.SIGKILL)
            assert await readers.run("a", len, "xyz") == 3

    asyncio.run(run())


def test_who_goes_away_does_not_end_it(model: Path) -> None:
    """A client that cancels call after call would make others wait for new processes."""

    async def run() -> None:
        async with open_readers(model) as readers:
            pid = await readers.run("a", os.getpid)
            gone = asyncio.ensure_future(readers.run("a", time.sleep, 0.2))
            await asyncio.sleep(0.05)
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone
            assert await readers.run("a", os.getpid) == pid

    asyncio.run(run())


def test_what_readers_import_is_light() -> None:
    """Each process of the gateway has such a process, which with torch would take 1.5 s and 180 MiB more."""
    script = f"import sys, {', '.join((Reader.__module__, *READ_BY))}; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
