"""Workers that are killed while requests are parked on them: tokens equal transformers'."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.e2e.test_recovery import OVERRIDES, VOCABULARY, info, whole
from tests.support.client_requests import GREEDY, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

pytestmark = pytest.mark.long
MOST, KILLS = 150, 4
SETTINGS: dict[str, Any] = {**OVERRIDES, "cache.num_pages": 32, "cache.parked_bytes": 64 << 20}


def decode_workers(address: str) -> list[inference_pb2.WorkerInfo]:
    workers = [worker for island in info(address).islands for worker in island.workers]
    return [worker for worker in workers if worker.role == inference_pb2.ROLE_DECODE and worker.alive]


@pytest.mark.parametrize("reserved", [1.0, 0.1], ids=["whole", "part"])
def test_parked_requests_survive_kills(small_model: Path, reserved: float) -> None:
    random = Random(1)
    prompts = [random_prompt(random.randint(20, 120), number, VOCABULARY) for number in range(40)]
    expected = greedy_all(load_oracle(small_model), prompts, MOST)
    cluster = Cluster(
        load_config(None, {"model.path": str(small_model), **SETTINGS, "scheduler.reserved_output": reserved}),
        LocalProcesses(STEADY),
    )
    address = cluster.start()
    try:

        def ask(number: int) -> list[int]:
            with Client(address) as client:
                priority = (0, 3, 10)[number % 3]
                stream = client.generate(prompts[number], max_tokens=MOST, priority=priority, timeout=200, **GREEDY)
                return tokens_of(list(stream))

        with ThreadPoolExecutor(16) as pool:
            asked: list[Future[list[int]]] = [pool.submit(ask, number) for number in range(len(prompts))]
            parks = 0
            for _ in range(KILLS):
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and not all(one.done() for one in asked):
                    parked = [worker for worker in decode_workers(address) if worker.parked]
                    if parked:
                        parks += 1
                        with suppress(ProcessLookupError):
                            os.kill(parked[0].pid, signal.SIGKILL)
                        time.sleep(1.0)
                        break
                    time.sleep(0.02)
            assert [one.result(200) for one in asked] == expected
        assert parks
        until(lambda: whole(address))
        assert not any(worker.parked or worker.parked_bytes_used for worker in decode_workers(address))
    finally:
        cluster.stop()
