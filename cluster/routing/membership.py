"""Which islands serve: what the supervisors tell the gateway, and every gateway after it."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.routing.worker_link import WorkerAddress


@dataclass(frozen=True)
class IslandState:
    """One island at one time. workers is empty while it takes no requests; `version` orders the states of an island."""

    name: str
    epoch: int
    restarts: int
    workers: tuple[WorkerAddress, ...]
    version: int = 0


class Membership:
    """The latest state of every island. Owned by the cluster; its supervisors use it from their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, IslandState] = {}
        self._gateway: ActorProcess | None = None

    def update(self, name: str, epoch: int, restarts: int, workers: tuple[WorkerAddress, ...]) -> list[Future[Any]]:
        """Keeps the new state and sends it to the gateway; the calls under way, none while no gateway serves."""
        with self._lock:
            before = self._states.get(name)
            version = 1 if before is None else before.version + 1
            state = self._states[name] = IslandState(name, epoch, restarts, workers, version)
            return [] if self._gateway is None else [self._gateway.call("update_island", state)]

    def attach(self, gateway: ActorProcess) -> list[Future[Any]]:
        """From now on this gateway is told; the calls that tell it all that is known."""
        with self._lock:
            self._gateway = gateway
            return [gateway.call("update_island", state) for state in self._states.values()]

    def detach(self) -> None:
        with self._lock:
            self._gateway = None

    def ask_placed_tokens(self, name: str) -> list[Future[Any]]:
        """Asks the gateway how much of the island's work is not yet done; no call while no gateway serves."""
        with self._lock:
            return [] if self._gateway is None else [self._gateway.call("placed_tokens", name)]
