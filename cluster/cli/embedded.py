"""A cluster of one prefill and one decode worker on this machine's CPU, for a run without a server."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tandem.cluster.config import load_config
from tandem.cluster.supervision.launcher import Cluster


@contextmanager
def embedded_cluster() -> Iterator[str]:
    """HOST:PORT of its gateway. It serves a tiny checkpoint of random weights, and ends with the context."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        make_checkpoint(Path(folder) / "model", arch="llama", size="tiny", seed=0)
        config = load_config(None, {"name": f"bench-{os.getpid()}", "gateway.port": 0, "model.path": f"{folder}/model"})
        cluster = Cluster(config)
        try:
            yield cluster.start()
        finally:
            cluster.stop()
