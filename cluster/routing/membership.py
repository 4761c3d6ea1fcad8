"""The islands that serve: the supervisors tell the gateway's processes, and each process that starts later."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.peers.hosts import GatewayHost, GatewayHosts
from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.cluster.scaling import ScalingState


@dataclass(frozen=True)
class IslandState:
    """One island at one time. workers is empty while it takes no requests; `version` orders the states of an island.

    number: its own in all epochs, counted from 0. gone: it is no part of the cluster any more.
    """

    name: str
    epoch: int
    restarts: int
    workers: tuple[WorkerAddress, ...]
    version: int = 0
    number: int = 0
    host: str = ""  # the address of its host
    gone: bool = False
    cut_off: frozenset[int] = frozenset()  # PEs that have ended themselves without telling their callers
    missing: int = 0  # workers that are being replaced while the others serve
    leaving: frozenset[int] = frozenset()  # PEs of workers that get no more requests, and end what they have


@dataclass(frozen=True)
class Outage:
    """The reason why no process can be placed, while running processes serve on; empty if processes can be placed.
    `version` orders outages."""

    version: int = 0
    reason: str = ""


class Membership:
    """The latest state of every island, and the hosts of gateways.

    Owned by the cluster; its supervisors use it from their threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[str, IslandState] = {}
        self._gateways: list[ActorProcess] = []
        self._hosts = GatewayHosts()
        self._scaling: ScalingState | None = None
        self._outage = Outage()
        self._adapters = AdapterSet()

    def update(
        self,
        name: str,
        epoch: int,
        restarts: int,
        workers: tuple[WorkerAddress, ...],
        host: str = "",
        cut_off: frozenset[int] = frozenset(),
        missing: int = 0,
        leaving: frozenset[int] = frozenset(),
    ) -> list[Future[Any]]:
        """Keeps the new state and sends it to the gateway's processes. Returns the calls under way, none if no gateway
        serves."""
        with self._lock:
            before = self._states.get(name)
            version, number = (1, len(self._states)) if before is None else (before.version + 1, before.number)
            state = self._states[name] = IslandState(
                name,
                epoch,
                restarts,
                workers,
                version,
                number,
                host,
                cut_off=cut_off,
                missing=missing,
                leaving=leaving,
            )
            return [gateway.call("update_island", state) for gateway in self._gateways]

    @property
    def islands(self) -> list[IslandState]:
        """The cluster's current islands. An island without workers takes no requests."""
        with self._lock:
            return [state for state in self._states.values() if not state.gone]

    def update_scaling(self, state: ScalingState) -> None:
        """Tells all gateway processes the state of the scaling policy."""
        with self._lock:
            self._scaling = state
            for gateway in self._gateways:
                gateway.call("update_scaling", state)

    def update_outage(self, reason: str) -> None:
        """Tells all why nothing can be started; an empty reason means that processes can start again."""
        with self._lock:
            self._outage = Outage(self._outage.version + 1, reason)
            for gateway in self._gateways:
                gateway.call("update_outage", self._outage)

    def update_adapters(self, adapters: AdapterSet) -> list[Future[Any]]:
        """Tells all which adapters are served. Returns the calls under way."""
        with self._lock:
            if adapters.version > self._adapters.version:
                self._adapters = adapters
            return [gateway.call("update_adapters", self._adapters) for gateway in self._gateways]

    @property
    def adapters(self) -> AdapterSet:
        """The LoRA adapters that are served now."""
        with self._lock:
            return self._adapters

    def update_host(self, host: GatewayHost) -> None:
        """Tells all which processes a host's gateway has now. A host without any has no gateway."""
        with self._lock:
            others = self._hosts.without(host.number)
            self._hosts = GatewayHosts(self._hosts.version + 1, (*others, host) if host.peers else others)
            for gateway in self._gateways:
                gateway.call("update_hosts", self._hosts)

    def remove(self, name: str) -> None:
        """Tells all that the island is gone. Another island may take its name and number later."""
        with self._lock:
            before = self._states.get(name)
            if before is None:
                return  # it never served
            state = self._states[name] = replace(before, workers=(), version=before.version + 1, gone=True)
            for gateway in self._gateways:
                gateway.call("update_island", state)

    def attach(self, gateway: ActorProcess) -> list[Future[Any]]:
        """Tells this process all that is known, and from now on all changes. Returns the calls that tell it."""
        with self._lock:
            self._gateways.append(gateway)
            if self._scaling is not None:
                gateway.call("update_scaling", self._scaling)
            if self._hosts.version:
                gateway.call("update_hosts", self._hosts)
            gateway.call("update_adapters", self._adapters)
            if self._outage.version:
                gateway.call("update_outage", self._outage)
            return [gateway.call("update_island", state) for state in self._states.values()]

    def detach(self, gateway: ActorProcess) -> None:
        """Stops telling the process anything. Idempotent."""
        with self._lock:
            self._gateways = [other for other in self._gateways if other is not gateway]

    def ask_placed_tokens(self, name: str) -> list[Future[Any]]:
        """Asks each process how much of the island's work it has not yet seen done. Makes no call if none serves."""
        with self._lock:
            return [gateway.call("placed_tokens", name) for gateway in self._gateways]

    def ask_unfinished(self, name: str, pes: frozenset[int], *, move: bool) -> list[Future[Any]]:
        """Asks each process how many requests it has at these workers of an island; see departures.py."""
        with self._lock:
            return [gateway.call("unfinished", name, pes, move) for gateway in self._gateways]
