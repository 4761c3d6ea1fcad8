"""Tests how a cluster that ends tells clients of running streams."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import Unavailable
from tandem.cluster.supervision.launcher import Cluster
from tests.support.client_requests import GREEDY
from tests.support.http_client import COMPLETIONS, streaming
from tests.support.local_processes import LocalProcesses

WORDS = "the cluster ends: it was stopped"
OVERRIDES: dict[str, Any] = {
    "island.threads_per_worker": 1,
    "cache.num_pages": 512,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.http_port": 0,
}


def test_streams_end_with_words(small_model: Path) -> None:
    """Streams over gRPC end with UNAVAILABLE, over HTTP with an error event and without [DONE]."""
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **OVERRIDES}), LocalProcesses())
    address = cluster.start()
    try:
        assert cluster.http_address is not None
        body = {"prompt": [5, 6, 7], "max_tokens": 1900, **GREEDY}
        with (
            Client(address, resume_seconds=0) as client,
            streaming(cluster.http_address, COMPLETIONS, **body) as lines,
        ):
            updates = client.generate([5, 6, 7], max_tokens=1900, timeout=60, **GREEDY)
            assert next(updates).token_ids
            assert next(lines)
            cluster.stop(grace=0.0)
            with pytest.raises(Unavailable, match=f"^{address}: {WORDS}$"):
                list(updates)
            *_, last = [line for line in lines if line]
            assert json.loads(last.removeprefix("data: "))["error"]["message"] == WORDS
    finally:
        cluster.stop()
