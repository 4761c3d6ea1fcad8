"""Cores that prefill workers leave idle go to decode, and back."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.cache.kernels.native.crew import Crew, load_crew
from tandem.cluster.client import Client
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.decode.kernel_threads import KernelThreads, threads_of
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY
from tests.support.island import running_island
from tests.support.oracle import random_prompt

OWN, ALL = 2, 4  # threads of a worker, and of both


def the_crew() -> Crew:
    crew = load_crew()
    assert crew is not None, "the tests need a C compiler"
    return crew


def wait_for_threads(crew: Crew, threads: int) -> None:
    deadline = time.monotonic() + 20
    while crew.threads != threads:
        assert time.monotonic() < deadline, f"{crew.threads} threads, not {threads}"
        time.sleep(0.001)


def test_decode_has_all_cores_only_while_no_prompt_is_on_its_way(tmp_path: Path) -> None:
    folder, crew = save_checkpoint("llama", tmp_path), the_crew()
    with running_island(folder, {"island.threads_per_worker": OWN}) as island, Client(island.address) as client:
        list(client.generate(random_prompt(9, 0), max_tokens=4, **GREEDY))
        assert crew.threads == ALL
        ready = threading.Event()
        prefill = threading.Thread(target=island.workers[0].on_step_thread, args=(ready.wait,))
        prefill.start()
        asking = threading.Thread(target=list, args=(client.generate(random_prompt(9, 1), max_tokens=4, **GREEDY),))
        asking.start()
        wait_for_threads(crew, OWN)
        ready.set()
        for thread in (prefill, asking):
            thread.join(20)
        assert crew.threads == ALL
    crew.threads = 1


def test_workers_that_join_or_leave_change_the_share(tmp_path: Path) -> None:
    """Native kernels and torch share it. The next step has it."""
    folder, crew = save_checkpoint("llama", tmp_path), the_crew()
    with running_island(folder, {"island.threads_per_worker": OWN}) as island, Client(island.address) as client:
        decode = island.workers[1]
        decode.config = replace(decode.config, threads=None, num_pes=5)
        cores = len(os.sched_getaffinity(0))
        decode.share_cores(cores, 1, (1, 1, 3, 0, 0))
        assert decode.on_step_thread(torch.get_num_threads) == 1
        list(client.generate(random_prompt(9, 0), max_tokens=4, **GREEDY))
        assert crew.threads == 3, "one core of each of three workers"
    crew.threads = 1


def test_without_native_kernels_nothing_is_set() -> None:
    KernelThreads(None, own=2, alone=4).use(alone=True)


@pytest.mark.parametrize(
    ("threads", "workers_on_host", "decode_workers", "own", "alone"),
    [
        (None, 4, 1, 4, 12),
        (None, 4, None, 4, 4),
        (None, 40, 1, 1, 3),
        (2, 4, 1, 2, 6),
        (None, None, None, None, None),
    ],
)
def test_a_worker_shares_the_cores_of_the_host_that_it_is_on(
    threads: int | None,
    workers_on_host: int | None,
    decode_workers: int | None,
    own: int | None,
    alone: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts them itself: the launcher may be on another host."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    config = WorkerConfig(
        Role.DECODE, "i", 1, 2, 3, "", 64, "", threads=threads, workers_on_host=workers_on_host,
        decode_workers=decode_workers,
    )  # fmt: skip
    assert threads_of(config) == (own, alone)
    in_places = replace(config, num_pes=8, epochs=(1, 1, 1, 0, 0, 0, 0, 0))
    assert threads_of(in_places) == (own, alone), "vacant places count as workers"
    of_ranks = replace(in_places, ranks=(2,) * 8)
    assert threads_of(of_ranks) == (own, alone), "each rank has its part of what its worker may have"
