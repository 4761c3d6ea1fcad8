"""A cluster that is told to stop serves for a while longer, and reports that it is not ready."""

import threading
from pathlib import Path

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.http_client import get
from tests.support.local_processes import LocalProcesses
from tests.support.waiting import until

DRAIN_SECONDS = 4.0  # in which one small request is served, on a busy machine, too
OPTIONS = {
    "island.threads_per_worker": 1,
    "gateway.port": 0,
    "gateway.processes": 2,
    "gateway.drain_seconds": DRAIN_SECONDS,
    "metrics.port": 0,
    "cache.num_pages": 64,
}


def test_a_request_that_comes_while_it_drains_is_served(small_model: Path) -> None:
    processes = LocalProcesses()
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **OPTIONS}), processes)
    cluster.start()
    address, monitor = cluster.grpc_address, cluster.metrics_address or ""
    wanted = tokens_of(complete(address, [5, 6, 7], max_tokens=3, **GREEDY))
    assert get(monitor, "/ready").status_code == 200
    stopping = threading.Thread(target=cluster.stop)
    stopping.start()
    until(lambda: get(monitor, "/ready").status_code == 503)
    assert get(monitor, "/health").status_code == 200
    assert tokens_of(complete(address, [5, 6, 7], max_tokens=3, **GREEDY)) == wanted
    stopping.join()
    assert not processes.pids
