"""The process that Ray runs in a place: it keeps the place's GPU and imports, and forks the members' processes."""

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path

from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.leases import Lease
from tandem.cluster.processes.lifeline import wait_until_cut
from tandem.cluster.processes.process_tree import Process, children, kill, runs, started_at
from tandem.cluster.processes.processes import cluster_of

IMPORT_SECONDS = 600.0  # recovery.stalled_seconds is over before, unless it is longer
END_SECONDS = 10.0  # a killed process gives back its GPU's memory before it has ended
LAST_SECONDS = 4.0  # at most, for an actor's last messages
log = logging.getLogger(__name__)


class ProcessHost:
    """The process that Ray runs, with a GPU and cores of its own. It forks one member's process after another.

    It passes messages on as bytes, because reading them would need the imports of both ends.
    """

    def __init__(
        self,
        modules: Sequence[str],
        name: str,
        start: bytes,
        lifeline: str,
        forks: str,
        lease_seconds: float | None = None,
    ) -> None:
        """lifeline: the path of the launcher's lifeline. When it is cut, this process ends, and so do the processes
        that it has forked. forks: the address of the cluster's fork server on this host, which this process starts if
        nobody has.

        lease_seconds: for a process host on another host, which cannot see the launcher's lifeline. It ends with its
        lease, see leases.py.
        """
        self._raylet: Process = (os.getppid(), started_at(os.getppid()))
        self._agents = {process for process in children(os.getppid()) if _is_agent(process[0])}
        self._server = ForkServer(modules, cluster_of(name), forks)
        if lease_seconds is None:
            threading.Thread(target=self._end_with, args=(lifeline,), name="lifeline", daemon=True).start()
        self._actor: ForkedActor = self._server.fork(name, start, IMPORT_SECONDS)
        self._lease = None if lease_seconds is None else Lease(lease_seconds)
        if self._lease is not None:
            threading.Thread(target=self._end_after, args=(self._lease,), name="lease", daemon=True).start()

    def ready(self) -> None:
        """Returns once the constructor has run."""

    def niceness(self) -> int:
        """The niceness that this process, and all that it forks, have above their raylet's: RAY_worker_niceness adds
        it. Above 0 the other processes of the host go first. A raylet's own niceness is its user's choice."""
        return os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getppid())

    def renew(self) -> None:
        """Renews the lease."""
        if self._lease is not None:
            self._lease.renew()

    def start(self, name: str, start: bytes) -> None:
        """Starts another process. Call end() first."""
        self._actor = self._server.fork(name, start, IMPORT_SECONDS)

    def call(self, name: str, payload: bytes) -> bytes:
        """Relays a call as ForkedActor.relay() does. ProcessEnded for a call to an earlier process."""
        actor = self._actor
        if actor.name != name:
            raise ProcessEnded(name, "another process has replaced it")
        return actor.relay(payload).result()

    def end(self) -> bool:
        """Kills the process. Returns whether it has ended. Idempotent."""
        self._actor.kill()
        return self._actor.join(END_SECONDS)

    def _end_with(self, lifeline: str) -> None:
        wait_until_cut(lifeline)
        self._end_all()

    def _end_after(self, lease: Lease) -> None:
        lease.wait()
        log.warning("%s ends: its launcher was silent for too long (recovery.partition_seconds)", self._actor.name)
        self._end_all()

    def _end_all(self) -> None:
        with suppress(Exception):  # there may be no actor yet
            self._actor.call("abandon").result(LAST_SECONDS)
        if not runs(self._raylet):  # its agents would wait a minute for a GCS that is gone, too
            kill(self._agents)
        os._exit(0)


def check_niceness(host: str, asked: Future[int]) -> None:
    """asked: ProcessHost.niceness() of a process on that host. Ray's default is 15; tandem sets 0 for its own Ray."""
    if asked.exception() is None and asked.result() > 0:
        _warn_of_niceness(host, asked.result())


@cache  # once a host
def _warn_of_niceness(host: str, niceness: int) -> None:
    log.warning(
        "the Ray on %s runs its processes with niceness %d, so that other processes of that host go first: "
        "start it with RAY_worker_niceness=0 in its environment",
        host,
        niceness,
    )


def _is_agent(pid: int) -> bool:
    with suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return name.startswith(b"ray::") and name.rstrip().endswith(b"Agent")
    return False
