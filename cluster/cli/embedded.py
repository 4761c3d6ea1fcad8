"""A cluster of one prefill and one decode worker on this machine's CPU, for a run without a server or a checkpoint."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tandem.cluster.config import load_config
from tandem.cluster.supervision.launcher import Cluster


@contextmanager
def embedded_cluster(name: str = "bench", size: str = "tiny") -> Iterator[str]:
    """HOST:PORT of its gateway. The cluster serves a Llama of random weights until the context ends."""
    with tempfile.TemporaryDirectory(prefix=f"tandem-{name}-") as folder:
        make_checkpoint(Path(folder) / "model", arch="llama", size=size, seed=0)
        keys = {"name": f"{name}-{os.getpid()}", "gateway.port": 0, "model.path": f"{folder}/model"}
        config = load_config(None, keys)
        cluster = Cluster(config)
        try:
            yield cluster.start()
        finally:
            cluster.stop()
