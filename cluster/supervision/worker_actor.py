"""A worker in a cluster's process, with the methods that its supervisor calls."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.cluster.processes.forks.actor_server import set_title
from tandem.cluster.processes.gpus import VARIABLE, GpuClaim, with_peers
from tandem.cluster.supervision.heartbeat import KERNELS, MEETING
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.errors import PeerGone
from tandem.workers.config import WorkerConfig
from tandem.workers.logs import close_log, open_log
from tandem.workers.ports.tls import Identity
from tandem.workers.worker import Worker

# How long the event loop may keep the interpreter from the thread that launches kernels; Python's default is 5 ms.
SWITCH_SECONDS = 0.0001
BUILDER = "tandem.cluster.cli.kernels.build_here"  # a module that is run, and not imported
BUILD_SECONDS = 3600.0
LOST_POLL_SECONDS = 0.5
LOST_SECONDS = 5.0  # workers that leave one after another lose each other for a moment


class WorkerActor:
    """One worker in its own process. The calls that prepare it come one at a time; others may come beside them."""

    def __init__(self, config: WorkerConfig) -> None:
        if config.device == "cuda":  # which nothing has touched yet in this process
            os.environ[VARIABLE] = with_peers(os.environ.get(VARIABLE, ""))
            sys.setswitchinterval(SWITCH_SECONDS)
        rank = f".{config.rank}" if config.rank else ""
        self._log = open_log(config.logging, f"{config.island}/worker.{config.pe}{rank}")
        self._stopped = threading.Event()
        self._phase = ""  # of the start's present phase
        self._worker = Worker(config)
        self._claim: GpuClaim | None = None

    def build(self, order: str) -> list[str]:
        """Compiles the kernels that this host lacks, beside the other calls, in a process that ends with this one.
        order: see build_here.py. Returns what is lacking or failed, each with the reason. Raises
        CalledProcessError."""
        done = subprocess.run(
            [sys.executable, "-m", BUILDER, str(os.getpid())],
            input=order,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=BUILD_SECONDS,
            start_new_session=True,  # the builder kills its whole group
        )
        return json.loads(done.stdout)

    def load(self) -> None:
        with self._preparing("weights"):
            self._worker.load()

    def progress(self) -> tuple[str, int, int]:
        """Returns the phase of the start, bytes of weights read, and bytes of all weights; while kernels compile, the
        number of ready kernels, and 0."""
        if self._phase == KERNELS:
            return self._phase, self._worker.warm_parts, 0
        return self._phase, self._worker.loaded_bytes, self._worker.total_bytes

    def pages_that_fit(self, utilization: float) -> int:
        with self._preparing("memory"):
            self._claim = self._claim or GpuClaim(self._worker.gpu)
            return self._worker.pages_that_fit(utilization)

    def open(self, num_pages: int, endpoint: Endpoint = LOOPBACK) -> bytes:
        with self._preparing(MEETING):
            return self._worker.open(num_pages, endpoint)

    def join(self, handles: list[bytes]) -> None:
        with self._preparing(MEETING):
            self._worker.join(handles)

    def serve(self, host: str, identity: Identity | None) -> str:
        with self._preparing(KERNELS):
            return self._worker.serve(host, identity)

    def leave(self) -> None:
        with self._preparing(MEETING):
            self._worker.leave()

    def rejoin(self, name: str, config: WorkerConfig) -> None:
        """Joins another island. name: of this actor from now on."""
        set_title(name)
        with self._preparing(MEETING):
            self._worker.rejoin(config)

    def cut(self, pe: int) -> None:
        """Cuts off a peer. See PeerChanges, also for the next four methods."""
        self._worker.peers.cut(pe)

    def part(self, pe: int) -> None:
        self._worker.peers.part(pe)

    def offer(self, pe: int, epoch: int) -> bytes:
        return self._worker.peers.offer(pe, epoch)

    def reach(self, pe: int, handle: bytes) -> None:
        self._worker.peers.reach(pe, handle)

    def admit(self, pe: int, epoch: int) -> None:
        self._worker.peers.admit(pe, epoch)

    def share_cores(self, workers_on_host: int, decode_workers: int | None, epochs: tuple[int, ...]) -> None:
        self._worker.share_cores(workers_on_host, decode_workers, epochs)

    def ping(self) -> tuple[str, int] | None:
        """Returns when the worker takes a command; one that hangs in a step does not. See Heartbeat."""
        self._worker.ping()
        phase = self._phase
        got_to = self._worker.warm_parts if phase == KERNELS else self._worker.prepared
        return (phase, got_to) if phase else None

    @contextmanager
    def _preparing(self, phase: str) -> Iterator[None]:
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""

    def release(self, prefix: str, writer_quiet: bool = False) -> None:
        self._worker.release(prefix, writer_quiet)

    def abandon(self) -> None:
        """Called when the launcher or its Ray is lost. This process ends next."""

    def wait(self) -> None:
        """Returns after stop(). This call's future ends with the process.

        PeerGone once a peer has been lost for a while: this epoch cannot go on, though all its processes may.
        """
        lost_since: float | None = None
        while not self._stopped.wait(LOST_POLL_SECONDS):
            lost, now = self._worker.lost, time.monotonic()
            lost_since = (lost_since or now) if lost else None
            if lost_since is not None and now - lost_since > LOST_SECONDS:
                raise PeerGone(lost)

    def stop(self) -> None:
        self._worker.stop()
        if self._claim is not None:
            self._claim.release()
        close_log(self._log)
        self._stopped.set()
