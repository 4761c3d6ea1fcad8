"""A gateway in this process, with both frontends, whose workers answer as the test says."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.workers.event_loop import EventLoopThread
from tests.cluster.fake_worker import FakeWorker, Say
from tests.support.gateways import settings_of

PROMPT = [5, 6, 7]
TOKENS = [(8 * 3 + number * 5) % 100 for number in range(6)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": len(TOKENS), "return_token_ids": True}


def say(sequence: list[int]) -> int:
    return TOKENS[len(sequence) - len(PROMPT)]


@dataclass(frozen=True)
class OpenGateway:
    gateway: Gateway
    worker: FakeWorker
    events: EventLoopThread

    @property
    def http(self) -> str:
        return self.gateway._addresses.http or ""

    @property
    def grpc(self) -> str:
        return self.gateway._addresses.grpc

    @property
    def running(self) -> int:
        return self.gateway._requests.running

    def island_comes(self) -> None:
        self.events.run(self.gateway.update_island(self.worker.state("i", epoch=1, version=1)), timeout=10)


@contextmanager
def open_gateway(
    model: Path,
    options: dict[str, Any] | None = None,
    fails: dict[str, list[str]] | None = None,
    alone: bool = False,
    say: Say = say,
    stop_token: int | None = None,
    max_model_len: int = 256,
) -> Iterator[OpenGateway]:
    """A gateway in this process; fails, say and stop_token are FakeWorker's. alone: it knows no island yet."""
    events, worker = EventLoopThread("gateway"), FakeWorker(say, fails or {}, stop_token=stop_token)
    overrides = {"model.path": str(model), "gateway.port": 0, "gateway.http_port": 0, **(options or {})}
    gateway = Gateway(settings_of(load_config(None, overrides), max_model_len, max_model_len // 4))
    opened = OpenGateway(gateway, worker, events)
    try:
        events.run(worker.start(), timeout=10)
        events.run(gateway.start(), timeout=10)
        if not alone:
            opened.island_comes()
        yield opened
    finally:
        events.run(gateway.stop(0.1), timeout=30)
        events.run(worker.stop(), timeout=10)
        events.stop()
