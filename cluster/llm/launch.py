"""Starts a cluster from Python, as `tandem up` does, or connects to a running one."""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tandem.cluster.cli.preflight import check_host, check_ray
from tandem.cluster.cli.runtime_dir import ClusterLock
from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.llm.llm import LLM, AsyncLLM

NO_SECURITY = ClientSecurity()
_numbers = itertools.count(1)
log = logging.getLogger(__name__)


class Launch:
    """A cluster to be started: `with launch(…) as llm` gives an LLM, `async with launch(…) as llm` an AsyncLLM.

    The end of the block ends the cluster, and so does the end of this process, however it comes.
    """

    def __init__(self, config: ClusterConfig, ray_address: str | None, security: ClientSecurity) -> None:
        self.config = config
        self._ray_address = ray_address
        self._security = security
        self._running: LLM | None = None
        self._async: AsyncLLM | None = None

    def start(self) -> LLM:
        """Blocks until requests can come. close() of the result ends the cluster.

        Raises ConfigError, StartFailed, ClusterRunning; nothing is left then.
        """
        address, end = self._start()
        return LLM(address, self._security, end)

    def __enter__(self) -> LLM:
        self._running = self.start()
        return self._running

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        assert self._running is not None, "__enter__ comes first"
        self._running.close()

    async def __aenter__(self) -> AsyncLLM:
        address, end = await asyncio.to_thread(self._start)
        self._async = AsyncLLM(address, self._security, end)
        return self._async

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        assert self._async is not None, "__aenter__ comes first"
        await self._async.close()

    def _start(self) -> tuple[str, Callable[[], None]]:
        """Returns the gateway's address, and a function that ends the cluster."""
        with ExitStack() as stack:
            lock = stack.enter_context(ClusterLock(self.config.name))
            check_ray(self._ray_address)
            for warning in check_host(self.config, own_ray=self._ray_address is None):
                log.warning("%s", warning)
            # They import torch and Ray, which takes seconds: after the checks.
            from tandem.cluster.cli.kernels.once_a_host import build_beside
            from tandem.cluster.processes.ray_processes import RayProcesses
            from tandem.cluster.supervision.launcher import Cluster
            from tandem.cluster.supervision.process_modules import process_modules

            processes = RayProcesses(self._ray_address, modules=process_modules(self.config))
            cluster = Cluster(self.config, processes)
            stack.callback(cluster.stop)
            address = cluster.start(None, lambda: build_beside(self.config, log.info))
            lock.publish(address, cluster.clock.seconds, processes.log_folder(self.config.logging.folder))
            return address, stack.pop_all().close


def launch(
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
    ray_address: str | None = None,
    security: ClientSecurity = NO_SECURITY,
) -> Launch:
    """A cluster of a YAML file, or of the defaults: a prefill and a decode worker on CPUs.

    overrides: dotted keys and values, which win over the file's, as `tandem up --set` has them. model: a checkpoint's
    folder or hub id. ray_address: of a Ray to join; without it the cluster starts one. security: what the gateway asks
    of clients. The gateway takes a free port and the cluster a name of its own, unless the file or the overrides give
    them.

    Raises ConfigError, which names the key, the value and what it must be.
    """
    given = dict(overrides or {}) | ({} if model is None else {"model.path": str(model)})
    read = load_config(config, given)
    if "port" not in read.gateway.model_fields_set:
        given["gateway.port"] = 0
    if "name" not in read.model_fields_set:
        given["name"] = f"python-{os.getpid()}-{next(_numbers)}"
    return Launch(load_config(config, given), ray_address, security)


def connect(address: str, security: ClientSecurity = NO_SECURITY) -> LLM:
    """Connects to the gateway of a running cluster. address: HOST:PORT of its gRPC server. For asyncio use
    AsyncLLM(address)."""
    return LLM(address, security)
