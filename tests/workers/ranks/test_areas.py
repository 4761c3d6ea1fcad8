"""Checks how ranks on GPUs meet without their transport: each finds the others' memory, with a driver of the host's."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tandem.workers.errors import NoRanks, RankLost
from tandem.workers.ranks.areas import Areas
from tandem.workers.ranks.rank_memory import LOST, RankMemory, attach_memory, create_memory

COMPILER = shutil.which("gcc") or shutil.which("cc")
SIZE, NUM_BYTES, RING = 3, 4096, 4096
SECONDS = 60.0
EXTENT = SIZE, 2, 5, RING

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("cuda") / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(built), str(source)], check=True)
    return str(built)


@pytest.fixture
def fake(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)


def count(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(fake, name).value


def opened(ranks: Sequence[Areas], memory: RankMemory) -> list[list[int]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(one.open, memory, rank, NUM_BYTES, SECONDS) for rank, one in enumerate(ranks)]
        return [call.result() for call in calls]


def test_each_rank_finds_the_memory_of_all(library: str, fake: ctypes.CDLL) -> None:
    """Zeroed, again and again; and it keeps its own."""
    ranks, allocated = [Areas(library) for _ in range(SIZE)], count(fake, "num_allocated")
    own: list[int] = []
    for _ in range(3):
        areas = opened(ranks, create_memory(*EXTENT)[0])
        assert all(ctypes.string_at(address, NUM_BYTES) == bytes(NUM_BYTES) for found in areas for address in found)
        for writer, found in enumerate(areas):
            for area, address in enumerate(found):
                ctypes.memset(address + 10 * writer + area, 1 + writer, 1)
        for area, address in enumerate(found[area] for area, found in enumerate(areas)):
            assert [ctypes.string_at(address + 10 * writer + area, 1)[0] for writer in range(SIZE)] == [1, 2, 3]
        assert count(fake, "num_open") == SIZE * (SIZE - 1)
        for one in ranks:
            one.close()
            one.close()
        assert count(fake, "num_open") == 0
        now = [found[rank] for rank, found in enumerate(areas)]
        assert own in ([], now)
        own = now
    assert count(fake, "num_allocated") - allocated == SIZE


@pytest.mark.long
def test_in_another_process(library: str) -> None:
    memory, fd, handle = create_memory(2, 2, 5, RING)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_other, args=(library, handle, theirs))
    process.start()
    areas = Areas(library).open(memory, 0, NUM_BYTES, SECONDS)
    assert ours.recv() == "opened"
    ctypes.memset(areas[1] + 5, 7, 1)
    ours.send("written")
    assert ours.recv() == 7
    process.join()
    os.close(fd)


def _other(library: str, handle: bytes, pipe: Connection) -> None:
    _, own = Areas(library).open(attach_memory(handle, 2, 2, 5, RING), 1, NUM_BYTES, SECONDS)
    pipe.send("opened")
    pipe.recv()
    pipe.send(ctypes.string_at(own + 5, 1)[0])


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_that_does_not_come_is_not_waited_for_without_end(library: str, is_lost: bool) -> None:
    memory, _, _ = create_memory(*EXTENT)
    if is_lost:
        memory.states[1].set(LOST, 1)
    with pytest.raises(RankLost, match=r"rank 1 offered no memory for collectives within .* s, or is lost"):
        Areas(library).open(memory, 0, NUM_BYTES, SECONDS if is_lost else 0.05)


def test_gpus_that_are_not_peer_to_peer_are_refused(library: str, fake: ctypes.CDLL) -> None:
    memory, _, _ = create_memory(2, 2, 5, RING)
    refuses = ctypes.c_int.in_dll(fake, "refuses")
    refuses.value = 1
    try:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(Areas(library).open, memory, rank, NUM_BYTES, SECONDS) for rank in range(2)]
            with pytest.raises(NoRanks, match=r"rank 1 cannot be mapped here \(cuIpcOpenMemHandle_v2 .* error 217\)"):
                calls[0].result()
            with suppress(NoRanks):
                calls[1].result()
    finally:
        refuses.value = 0
