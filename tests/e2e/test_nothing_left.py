"""Islands come and go in one process: threads, descriptors and shared memory go with them."""

import gc
import os
import threading
from pathlib import Path

from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import random_prompt
from tests.support.shm import lasting_names


def held() -> tuple[int, int, set[str]]:
    """Returns our threads, memory segments, and names in /dev/shm."""
    gc.collect()
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the listing's own
    threads = sum(thread.name in ("step", "grpc", "gateway") for thread in threading.enumerate())
    return threads, sum("memfd:" in link for link in links), lasting_names()


def serve_a_little(folder: Path, seed: int, threads: int) -> None:
    with running_island(folder) as island:
        prompts = [random_prompt(30, seed * 10 + number) for number in range(4)]
        complete_all(island.address, prompts, max_tokens=4, **GREEDY)
        assert held()[0] == threads


def test_three_islands_one_after_the_other(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    before = held()
    for seed in range(3):
        serve_a_little(folder, seed, before[0] + 5)  # two workers with two threads each, and the gateway's
        assert held() == before
