"""The ports and table that a host's gateway processes share. The launcher or a process of the host owns them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.table import Column, GatewayFile, GatewayTable
from tandem.cluster.processes.processes import ActorProcess, ProcessGroup
from tandem.cluster.supervision.shared_ports import SharedPorts
from tandem.cluster.supervision.stop_signal import StopSignal

CALL_SECONDS = 5.0  # for the owner on another host to answer


@dataclass(frozen=True)
class ShareOrder:
    """The requested ports, 0 for any free one, and the size of the table. beside: see SharedPorts."""

    host: str
    port: int
    http_port: int | None
    metrics: tuple[str, int | None]
    beside: frozenset[int]
    processes: int
    num_islands: int


@dataclass(frozen=True)
class Shared:
    """The ports that were taken, and the path of the table on that host."""

    table: str
    port: int
    http_port: int | None
    metrics_port: int | None


@dataclass(frozen=True)
class HostCounts:
    """The counts of a host's gateway processes together. lasting: its LASTING_CELLS. cells: of GatewayTable.placed,
    those that are not 0. tokens: in each of them."""

    queued: int
    lasting: Int64Array
    cells: Int64Array
    tokens: Int64Array


class HostShare(ABC):
    """The share of one host, until close(). Used by the supervisor's thread."""

    shared: Shared

    @abstractmethod
    def clear(self, process: int, restarts: int) -> None:
        """Clears the process's row, as GatewayTable.clear() does."""

    @abstractmethod
    def counts(self) -> "Future[HostCounts]":
        """Begins to read the counts. Does not block. From any thread."""

    @abstractmethod
    def is_there(self) -> bool:
        """True if its owner answers."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. Idempotent."""


class OwnShare(HostShare):
    """A share that this process owns."""

    def __init__(self, order: ShareOrder) -> None:
        """Raises StartFailed if a port cannot be had."""
        self._ports = SharedPorts(order.host, order.port, order.http_port, order.metrics, order.beside)
        self._file = GatewayFile(order.processes, order.num_islands)
        ports = self._ports
        self.shared = Shared(self._file.path, ports.port, ports.http_port, ports.metrics_port)

    @property
    def table(self) -> GatewayTable:
        return self._file.table

    def clear(self, process: int, restarts: int) -> None:
        self.table.clear(process, restarts)

    def counts(self) -> "Future[HostCounts]":
        answer: Future[HostCounts] = Future()
        rows: Sequence[Any] = [self.table.lasting(process) for process in range(self.table.processes)]
        lasting = np.sum([np.frombuffer(row, np.int64) for row in rows], axis=0)
        placed = self.table.placed
        cells = np.flatnonzero(placed)
        answer.set_result(HostCounts(self.table.total(Column.QUEUED), lasting, cells, placed[cells]))
        return answer

    def is_there(self) -> bool:
        return True

    def close(self) -> None:
        self._ports.close()
        self._file.close()


class ShareOwner:
    """The actor that owns a share on another host, in a process of its own."""

    def __init__(self, order: ShareOrder) -> None:
        self._share = OwnShare(order)
        self._stopped = threading.Event()

    def shared(self) -> Shared:
        return self._share.shared

    def clear(self, process: int, restarts: int) -> None:
        self._share.clear(process, restarts)

    def counts(self) -> HostCounts:
        return self._share.counts().result()

    def ping(self) -> None:
        """Returns while the process answers."""

    def abandon(self) -> None:
        """Returns at once: what this actor owns ends with the process. See WorkerActor.abandon."""

    def wait(self) -> None:
        self._stopped.wait()


class FarShare(HostShare):
    """The share of another host, which its ShareOwner owns."""

    def __init__(self, group: ProcessGroup, shared: Shared) -> None:
        """group: of the owner alone."""
        self._group = group
        self.owner: ActorProcess = group.members[0]
        self.shared = shared

    def clear(self, process: int, restarts: int) -> None:
        with suppress(Exception):  # the supervisor sees next that it is gone
            self.owner.call("clear", process, restarts).result(CALL_SECONDS)

    def counts(self) -> "Future[HostCounts]":
        return self.owner.call("counts")

    def is_there(self) -> bool:
        try:
            StopSignal().results([self.owner.call("ping")], CALL_SECONDS)
        except Exception:  # whatever the error was, it has not answered
            return False
        return True

    def close(self) -> None:
        self._group.end()
