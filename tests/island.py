"""A whole island in the test's own process: real workers, transport, gRPC and gateway, without Ray.

Starts in a fraction of a second, so that every checkpoint can have one. What needs processes of their own is tested
through tandem.cluster.launcher.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.gateway import Gateway, GatewaySettings
from tandem.cluster.worker_link import WorkerAddress
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.event_loop import EventLoopThread
from tandem.workers.models.registry import load_config
from tandem.workers.worker import Worker


@dataclass(frozen=True)
class Island:
    """workers are in the order of their PEs, prefill first."""

    address: str
    workers: list[Worker]
    gateway: Gateway

    def client(self) -> Client:
        return Client(self.address)


@contextmanager
def running_island(
    model: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    gateway: dict[str, Any] | None = None,
    **worker: Any,
) -> Iterator[Island]:
    """`worker` and `gateway` override fields of WorkerConfig and GatewaySettings."""
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    common = {"max_batch_tokens": 64, "num_pages": 256, "page_size": 8} | worker
    configs = [
        WorkerConfig(role=role, island="test", epoch=1, pe=pe, num_pes=len(roles), model_path=str(model), **common)
        for pe, role in enumerate(roles)
    ]
    workers = [Worker(config) for config in configs]
    events = EventLoopThread("gateway")
    door: Gateway | None = None
    try:
        for one in workers:
            one.load()
        handles = [one.open() for one in workers]
        for one in workers:
            one.join(handles)
        addresses = tuple(WorkerAddress(one.config.role, one.config.pe, one.serve()) for one in workers)
        settings = {
            "cluster": "test",
            "island": "test",
            "epoch": 1,
            "transport": "shared_memory",
            "workers": addresses,
            "model_path": str(model),
            "dtype": configs[0].dtype,
            "max_model_len": configs[0].max_model_len or load_config(model).max_position_embeddings,
            "page_size": configs[0].page_size,
            "num_pages": configs[0].num_pages,
            "host": "127.0.0.1",
            "port": 0,
            "max_queued": 1024,
            "queue_seconds": 60.0,
            "request_seconds": 120.0,
            "max_message_bytes": 16 << 20,
        }
        door = Gateway(GatewaySettings(**(settings | (gateway or {}))))
        yield Island(events.run(door.start(), timeout=30), workers, door)
    finally:
        if door is not None:
            events.run(door.stop(0.5), timeout=30)
        events.stop()
        for one in workers:
            one.stop()
