"""Embeddings whose workers are killed: their prompts go to other workers. Real processes, without Ray."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.support.embedding_models import EmbeddingOracle, save_embedding_model
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.waiting import until

pytestmark = pytest.mark.long
ROUNDS = 6


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_killed_workers_lose_no_embedding(transport: str, tmp_path: Path) -> None:
    """Over shared memory an island is lost with its worker; over TCP its worker is replaced alone."""
    folder = save_embedding_model(tmp_path)
    inputs = [random_prompt(300, seed=number, vocab_size=300) for number in range(12)]
    expected = EmbeddingOracle(folder).embed(inputs)
    settings = {
        "model.path": str(folder),
        "num_islands": 2,
        "island.transport": transport,
        "island.threads_per_worker": 1,
        "scheduler.max_batch_tokens": 64,
        "cache.num_pages": 128,
        "cache.prefix_sharing": False,
        "gateway.processes": 1,
        "gateway.port": 0,
        "gateway.max_attempts": 20,
        "recovery.max_restarts": 100,
    }
    processes = LocalProcesses()
    cluster = Cluster(load_config(None, settings), processes)
    try:
        address = cluster.start()
        with ThreadPoolExecutor(3) as pool, Client(address) as client:
            asking = [pool.submit(lambda: [client.embed(inputs) for _ in range(ROUNDS)]) for _ in range(3)]
            for island in ("local-0", "local-1"):
                until(lambda: any(one.waiting + one.running for one in workers_of(client)))
                victims = [pid for name, pid in processes.pids.items() if f"/{island}." in name and "/prefill" in name]
                os.kill(victims[-1], signal.SIGKILL)
                until(lambda: sum(one.alive for one in workers_of(client)) == 4)
            answers = [answer for one in asking for answer in one.result()]
        assert len(answers) == 3 * ROUNDS
        for answer in answers:
            np.testing.assert_allclose(answer.values, expected, rtol=0, atol=1e-5)
        assert max(answer.timings.attempts for answer in answers) > 1
    finally:
        cluster.stop()


def workers_of(client: Client) -> list[inference_pb2.WorkerInfo]:
    return [worker for island in client.cluster_info().islands for worker in island.workers]
