"""The processes of one island in one epoch: how they are started, made one island, watched and ended."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

from tandem.cluster.actors import WorkerActor
from tandem.cluster.config import ClusterConfig
from tandem.cluster.errors import StartFailed, TandemError
from tandem.cluster.liveness import Liveness
from tandem.cluster.process_settings import agreed_pages, utilization_to_fill, worker_configs
from tandem.cluster.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.start_clock import StartClock
from tandem.cluster.stop_signal import Stopping, StopSignal
from tandem.cluster.worker_link import WorkerAddress
from tandem.workers.config import Role, WorkerConfig

START_SECONDS = 600.0
STOP_SECONDS = 30.0
RELEASE_SECONDS = 30.0
PROGRESS_SECONDS = 2.0

LoadState = tuple[str, int, int]  # worker, bytes loaded, bytes in all


class Island:
    """launch() → load() → form() → watch(), then end(): one thread calls them. What waits raises Stopping when told.

    An island is formed once: when a member is lost the others end too, and the next epoch is another Island.
    StartFailed and ProcessEnded say that it did not come about.
    """

    def __init__(self, processes: Processes, config: ClusterConfig, max_model_len: int, name: str, epoch: int) -> None:
        self._processes = processes
        self._config = config
        self._max_model_len = max_model_len
        self._workers = worker_configs(config, max_model_len, name, epoch)
        self._group: ProcessGroup | None = None
        self.clock = StartClock()
        self.num_pages = 0  # of each worker, once the island is formed

    def launch(self, stop: StopSignal) -> None:
        """Starts the processes."""
        specs = [ActorSpec(self._process_name(worker), WorkerActor, worker) for worker in self._workers]
        first = self._workers[0]
        gpus = 1 if first.device == "cuda" else 0
        with self.clock.phase("processes, imports"):
            self._group = self._processes.start_group(specs, gpus=gpus, threads=first.threads or 1)
            self._liveness = Liveness(self._group.members, self._config.recovery.unresponsive_seconds, stop)
            self._all("progress")  # answered once the process has its imports

    def load(self) -> None:
        """Reads the weights; progress() tells how far."""
        with self.clock.phase("weights"):
            self._all("load")

    def form(self, num_pages: int | None = None) -> tuple[WorkerAddress, ...]:
        """Handles travel by way of this process: every PE opens its memory, then every PE maps all the others'.

        num_pages: what an earlier epoch had; the gateway admits requests by it, so with less there is no island.
        """
        with self.clock.phase("island"):
            utilization = utilization_to_fill(self._config)
            fitting = [] if utilization is None else self._all("pages_that_fit", utilization)
            fitting_all = agreed_pages(self._config, fitting, self._max_model_len)
            if num_pages is not None and fitting_all < num_pages:
                raise StartFailed(f"there is room for {fitting_all} pages; the island had {num_pages} before")
            self.num_pages = num_pages or fitting_all
            handles = self._all("open", self.num_pages)
            self._all("join", handles)
        with self.clock.phase("kernels"):
            addresses = self._all("serve")
        return tuple(
            WorkerAddress(worker.role, worker.pe, address, worker.token)
            for worker, address in zip(self._workers, addresses, strict=True)
        )

    def watch(self) -> NoReturn:
        """Raises ProcessEnded when a member is lost."""
        self._liveness.watch()

    def progress(self) -> list[LoadState]:
        """How far each worker has loaded; empty when they do not tell. From any thread."""
        calls = [member.call("progress") for member in self._members]
        try:
            states = StopSignal().results(calls, PROGRESS_SECONDS)
        except (TandemError, TimeoutError):
            return []
        names = (f"{worker.island} {_name(worker)}" for worker in self._workers)
        return [(name, *state) for name, state in zip(names, states, strict=False)]

    def release(self, prefix: str) -> None:
        """Ends the requests whose ids begin with `prefix`: whoever had asked for them is gone. From any thread.

        The senders first: their answer means that they write no more, and only then may receivers reuse pages.
        """
        quiet = self._try(Role.PREFILL, "release", prefix)
        self._try(Role.DECODE, "release", prefix, quiet)

    def end(self, gently: bool) -> None:
        """Ends the processes; gently lets them close what they hold, which only an unbroken island can. Idempotent."""
        if gently:
            with suppress(Exception):  # what does not stop by itself is killed next
                StopSignal().results([member.call("stop") for member in self._members], STOP_SECONDS)
        if self._group is not None:
            self._group.end()
            self._group = None

    @property
    def worker_token(self) -> str:
        """What the workers ask for; for who speaks to them past the gateway, as benchmarks do."""
        return self._workers[0].token

    @property
    def _members(self) -> Sequence[ActorProcess]:
        group = self._group
        return () if group is None else group.members

    def _process_name(self, worker: WorkerConfig) -> str:
        return f"{self._config.name}/{worker.island}.{worker.epoch}/{_name(worker)}"

    def _all(self, method: str, *arguments: object) -> list[Any]:
        """What all workers returned; a TandemError that one raised comes out as it is, others as StartFailed."""
        calls: list[Future[Any]] = [member.call(method, *arguments) for member in self._members]
        try:
            return self._liveness.results(calls, START_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error

    def _try(self, role: Role, method: str, *arguments: object) -> bool:
        """Whether all members of the role did it in time."""
        members = zip(self._workers, self._members, strict=False)
        calls = [member.call(method, *arguments) for worker, member in members if worker.role == role]
        try:
            StopSignal().results(calls, RELEASE_SECONDS)
        except (TandemError, TimeoutError, RuntimeError):
            return False
        return True


def _name(worker: WorkerConfig) -> str:
    return f"{worker.role} (PE {worker.pe})"
