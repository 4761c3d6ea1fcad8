"""A whole island in the test's own process: real workers, transport, gRPC and gateway, without Ray.

Starts in a fraction of a second, so that every checkpoint can have one. What needs processes of their own is tested
through tandem.cluster.supervision.launcher.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.config.cluster_config import load_config as load_cluster_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.cluster.supervision.process_settings import agreed_pages, worker_configs
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tandem.workers.config import WorkerConfig
from tandem.workers.event_loop import EventLoopThread
from tandem.workers.models.registry import load_config
from tandem.workers.worker import Worker
from tests.support.fake_transport import FakeFabric
from tests.support.gateways import settings_of
from tests.support.poison import poison_free_pages


@dataclass(frozen=True)
class Island:
    """An island. Its workers are in the order of their PEs, prefill first, and of their ranks."""

    address: str
    workers: list[Worker]
    gateway: Gateway

    @property
    def http(self) -> str:
        """HOST:PORT of the HTTP server; empty without one."""
        return self.gateway._addresses.http or ""

    def client(self) -> Client:
        return Client(self.address)


class FakeIsland:
    """Makes the fake transports of one island, for running_island; fabric is there once a worker was made."""

    fabric: FakeFabric

    def __call__(self, name: str, config: TransportConfig) -> Transport:
        if config.pe == 0:
            self.fabric = FakeFabric(
                config.num_pes,
                config.layout,
                num_pages=config.num_pages,
                num_signals=config.num_signals,
                island=config.island,
                epoch=config.epoch,
            )
        return self.fabric.transport(config.pe)


@contextmanager
def running_island(
    model: Path,
    overrides: dict[str, Any] | None = None,
    transports: Callable[[str, TransportConfig], Transport] = create_transport,
) -> Iterator[Island]:
    """overrides: dotted keys of the cluster's configuration. Small pages and chunks unless they say otherwise.

    What was pushed is compared with what was sent, and pages that nobody holds are full of NaN.
    """
    defaults = {
        "model.path": str(model),
        "cache.page_size": 8,
        "cache.num_pages": 256,
        "scheduler.max_batch_tokens": 64,
        "island.threads_per_worker": 1,
        "island.verify_kv": True,
        "gateway.port": 0,
    }
    config = load_cluster_config(None, defaults | (overrides or {}))
    max_model_len = config.model.max_model_len or load_config(model).max_length
    workers = [Worker(one, transports) for one in worker_configs(config, max_model_len)]
    try:
        for worker in workers:
            worker.load()
        num_pages = agreed_pages(config, (), max_model_len)
        handles = [worker.open(num_pages) for worker in workers]
        for worker in workers:
            worker.join(handles)
        with ThreadPoolExecutor(len(workers) if workers[0].config.ranks else 1) as serving:
            addresses = list(serving.map(Worker.serve, workers))  # a follower is prepared when its leader is
        for worker in workers:
            worker.on_step_thread(partial(poison_free_pages, worker.cache, worker.pools))
        with running_gateway(config, num_pages, [worker.config for worker in workers], addresses) as (address, gateway):
            yield Island(address, workers, gateway)
    finally:
        for worker in workers:
            worker.stop()


@contextmanager
def running_gateway(
    config: ClusterConfig, num_pages: int, workers: Sequence[WorkerConfig], addresses: Sequence[str]
) -> Iterator[tuple[str, Gateway]]:
    """Runs a gateway in this process, and yields its address. addresses: of each of the island's workers."""
    events = EventLoopThread("gateway")
    gateway = Gateway(settings_of(config, workers[0].max_model_len, num_pages))
    try:
        there = tuple(
            WorkerAddress(worker.role, worker.pe, address, worker.token)
            for worker, address in zip(workers, addresses, strict=True)
            if worker.rank == 0  # others follow
        )
        listening = events.run(gateway.start(), timeout=30)
        state = IslandState(workers[0].island, workers[0].epoch, 0, there, version=1)
        events.run(gateway.update_island(state), timeout=30)
        yield listening.grpc, gateway
    finally:
        events.run(gateway.stop(0.5), timeout=30)
        events.stop()
