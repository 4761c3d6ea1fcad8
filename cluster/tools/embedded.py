"""A cluster of one prefill and one decode worker on this machine's CPU, for runs without a server or a checkpoint."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.forking import fork_beside
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint


@contextmanager
def embedded_cluster(
    name: str = "bench",
    model: Path | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_fresh: bool = False,
) -> Iterator[str]:
    """Yields HOST:PORT of its gateway, until the context ends. model: None makes a tiny Llama of random weights.
    settings: further keys of the configuration. is_fresh: this process has no threads and has computed nothing, so that
    it can be forked."""
    with tempfile.TemporaryDirectory(prefix=f"tandem-{name}-") as folder:
        if model is None:
            model = Path(folder) / "model"
            make_checkpoint(model, arch="llama", size="tiny", seed=0)
        keys = {"name": f"{name}-{os.getpid()}", "gateway.port": 0, "model.path": str(model)}
        config = load_config(None, keys | dict(settings))
        processes = RayProcesses(forks=fork_beside(config)) if is_fresh else None
        cluster = Cluster(config, processes)
        try:
            yield cluster.start()
        finally:
            cluster.stop()
