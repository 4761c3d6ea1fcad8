"""The processes of one island in one epoch: how they are started, made one island, watched and ended."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn

from tandem.cluster.actors import WorkerActor
from tandem.cluster.errors import StartFailed, TandemError
from tandem.cluster.liveness import Liveness
from tandem.cluster.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
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

    def __init__(
        self, processes: Processes, cluster: str, configs: Sequence[WorkerConfig], unresponsive_seconds: float
    ) -> None:
        self._processes = processes
        self._cluster = cluster
        self._configs = configs
        self._unresponsive_seconds = unresponsive_seconds
        self._group: ProcessGroup | None = None

    def launch(self, stop: StopSignal) -> None:
        """Starts the processes; their constructors may still run when it returns."""
        specs = [ActorSpec(self._process_name(config), WorkerActor, config) for config in self._configs]
        first = self._configs[0]
        gpus = 1 if first.device == "cuda" else 0
        self._group = self._processes.start_group(specs, gpus=gpus, threads=first.threads or 1)
        self._liveness = Liveness(self._group.members, self._unresponsive_seconds, stop)

    def load(self) -> None:
        """Reads the weights; progress() tells how far."""
        self._all("load")

    def form(self) -> tuple[WorkerAddress, ...]:
        """Handles travel by way of this process: every PE opens its memory, then every PE maps all the others'."""
        handles = self._all("open")
        self._all("join", handles)
        addresses = self._all("serve")
        return tuple(
            WorkerAddress(config.role, config.pe, address)
            for config, address in zip(self._configs, addresses, strict=True)
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
        names = (f"{config.island} {_name(config)}" for config in self._configs)
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
    def _members(self) -> Sequence[ActorProcess]:
        group = self._group
        return () if group is None else group.members

    def _process_name(self, config: WorkerConfig) -> str:
        return f"{self._cluster}/{config.island}.{config.epoch}/{_name(config)}"

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
        workers = zip(self._configs, self._members, strict=False)
        calls = [member.call(method, *arguments) for config, member in workers if config.role == role]
        try:
            StopSignal().results(calls, RELEASE_SECONDS)
        except (TandemError, TimeoutError, RuntimeError):
            return False
        return True


def _name(config: WorkerConfig) -> str:
    return f"{config.role} (PE {config.pe})"
