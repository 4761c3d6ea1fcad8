"""The processes of one island in one epoch."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.cluster.scaling import Shape, keep_members
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.network import Network
from tandem.cluster.supervision.process_modules import worker_modules
from tandem.cluster.supervision.process_settings import agreed_pages, utilization_to_fill, worker_configs
from tandem.cluster.supervision.start_clock import StartClock
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.transfer.island_ranks import IslandRanks
from tandem.workers.config import Role, WorkerConfig

START_SECONDS = 600.0
STOP_SECONDS = 30.0
RELEASE_SECONDS = 30.0
PROGRESS_SECONDS = 2.0
BuildOnHosts = Callable[[Sequence[ActorProcess]], list[Future[None]]]
LoadState = tuple[str, str, int, int]  # worker, phase of its start, bytes loaded, bytes in all


class Island:
    """An island's processes in one epoch: launch() → load() → form() → wait_for() → end(), all from one thread.

    Before form() a lost member can be replaced alone: its peers keep their imports and weights. After that, unless this
    is an ElasticIsland, a lost member ends the epoch. The next epoch is another Island:
    - succeed() → launch() → … starts its processes in the places of the old ones;
    - extend() → take_over() → wait_for() → … keeps the old processes that the new shape needs.
    Waits raise Stopping after the stop signal. StartFailed and ProcessEnded: the island was not formed.
    """

    def __init__(
        self,
        processes: Processes,
        config: ClusterConfig,
        max_model_len: int,
        name: str,
        epoch: int,
        network: Network | None = None,
    ) -> None:
        """network: None is loopback."""
        self._processes = processes
        self._network = network or Network(config)
        self._config = config
        self._max_model_len = max_model_len
        workers = worker_configs(config, max_model_len, name, epoch, self._network.num_hosts)
        silent = self._network.silent_seconds
        self._workers = self._in_places([replace(worker, silent_seconds=silent) for worker in workers])
        self._group: ProcessGroup | None = None  # shared with the epoch whose processes these are
        self._members: list[ActorProcess] = []  # in the order of their PEs and ranks
        self._loads: dict[ActorProcess, Future[Any]] = {}
        self._fitting = 0  # pages; see _measure()
        self._replacements: set[str] = set()  # names
        self._addresses: tuple[WorkerAddress, ...] = ()  # once the island is formed
        self.built: Future[None] | None = None  # kernels that this host compiles; None: it has all
        self.build_on_hosts: BuildOnHosts | None = None  # begins to compile on the hosts of these members
        self.clock = StartClock()
        self.num_pages = 0  # of each worker, once the island is formed
        self.formed = False

    @property
    def shape(self) -> Shape:
        """The shape of the workers that the island has now."""
        roles = [worker.role for worker in self._leaders]
        return Shape(roles.count(Role.PREFILL), roles.count(Role.DECODE))

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The addresses of the workers that serve; none before form()."""
        return self._addresses

    def launch(self, stop: StopSignal) -> None:
        """Starts the processes."""
        gpus = 1 if self._workers[0].device == "cuda" else 0
        with self.clock.phase("processes, imports"):
            specs = [self._spec(worker) for worker in self._workers]
            self._group = self._processes.start_again(
                self._group, specs, gpus=gpus, threads=self._threads, where=self._network.where
            )
            self._members = list(self._group.members)
            self._liveness = Liveness(self._members, self._config.recovery, stop)
            self._all("progress")  # answered once the process has its imports

    def succeed(self, before: "Island") -> None:
        """Takes the places of `before`, which is over. launch() ends the processes there and starts this island's.

        If `before` was not formed, its places may be why: they are given back, and launch() finds others.
        """
        if not before.formed:
            before.end(gently=False)
        self._group, before._group, before._members = before._group, None, []

    def load(self) -> None:
        """Reads the weights, see progress(), and measures the room beside them. Returns once all hosts have the kernels
        that workers need."""
        built = [*self._builds(self._members), *([] if self.built is None else [self.built])]
        with self.clock.phase("weights"):
            for member in self._members:
                if member not in self._loads:
                    self._loads[member] = member.call("load")
            self._results(list(self._loads.values()))
        with nullcontext() if utilization_to_fill(self._config) is None else self.clock.phase("memory"):
            self._fitting = self._measure(self._members)  # Triton compiles in this forward, beside the other compilers
        if built:
            with nullcontext() if all(one.done() for one in built) else self.clock.phase("builds"):
                self._liveness.results(built, math.inf)

    def may_replace(self, lost: ProcessEnded) -> bool:
        """Returns whether the lost process is a member and no replacement, whose place may be the cause."""
        return any(member.name == lost.name for member in self._members) and lost.name not in self._replacements

    def replace(self, lost: ProcessEnded) -> None:
        """Replaces a member that has ended, between launch() and form(), if may_replace() allows it. load() comes next.
        StartFailed: the island cannot be formed."""
        assert self._group is not None, "launch() comes first"
        pe = next(pe for pe, member in enumerate(self._members) if member.name == lost.name)
        member, spec = self._members[pe], self._spec(self._workers[pe])
        self._liveness.forget([member])
        self._loads.pop(member, None)
        with self.clock.phase("processes, imports"):
            named = replace(spec, name=f"{spec.name} again")
            self._replacements.add(named.name)
            if self._config.island.ranks.has_several:  # ranks share a host
                started = self._group.replace(member, named)
            else:
                (started,) = self._group.replace_anywhere([member], [named], threads=self._threads)
            self._members[pe] = started
            self._liveness.add([started])
            self._results([started.call("progress")])

    def form(self, num_pages: int | None = None) -> tuple[WorkerAddress, ...]:
        """Makes every PE open its memory, then map the memory of all others. Handles travel through this process.

        num_pages: of an earlier epoch. The gateway admits requests by it, so fewer pages are StartFailed.
        """
        with self.clock.phase("island"):
            self.num_pages = self._agree(self._fitting, num_pages)
            self._join()
        with self.clock.phase("kernels"):
            return self._serve()

    def extend(self, before: "Island") -> int:
        """Starts and loads the workers that `before` lacks, while `before` serves on. Returns their number.

        StartFailed or a worker's error: the new processes end, and `before` is as it was. ProcessEnded: `before` has
        lost a member.
        """
        assert before._group is not None, "launch() comes first"
        kept = self._kept(before)
        specs = [self._spec(worker) for worker, pe in zip(self._workers, kept, strict=True) if pe is None]
        started = before._group.grow(specs, threads=self._threads)
        try:
            before._liveness.add(started)
            self._group, self._liveness = before._group, before._liveness
            unused = iter(started)
            self._members = [next(unused) if pe is None else before._members[pe] for pe in kept]
            built = self._builds(started)
            self._ask(started, "load")
            self._liveness.results(built, math.inf)
            if started:
                self._agree(self._measure(started), before.num_pages)
        except BaseException as error:
            before._liveness.forget(started)
            before._group.shrink(started)
            if isinstance(error, ProcessEnded) and error.name in [member.name for member in started]:
                raise StartFailed(str(error)) from error
            raise
        return sum(worker.rank == 0 for worker, old in zip(self._workers, kept, strict=True) if old is None)

    def take_over(self, before: "Island") -> tuple[WorkerAddress, ...]:
        """After extend(): ends `before` and the calls of its workers, then forms this island. Otherwise as form()."""
        assert self._group is not None, "extend() comes first"
        before._all("leave")
        gone = [member for member in before._members if member not in self._members]
        self._liveness.forget(gone)
        before._stop_gently(gone)
        self._group.shrink(gone)
        kept = [(member, worker) for member, worker in zip(self._members, self._workers, strict=True)
                if member in before._members]  # fmt: skip
        for member, worker in kept:
            member.name = self._spec(worker).name
        self._results([member.call("rejoin", member.name, worker) for member, worker in kept])
        self.num_pages = before.num_pages
        self._join()
        return self._serve()

    def wait_for(self, event: Future[Any]) -> None:
        """Returns after the event. ProcessEnded when a member is lost."""
        self._liveness.results([event], math.inf)

    def progress(self) -> list[LoadState]:
        """Each worker's progress; empty when one does not answer. From any thread."""
        calls = [member.call("progress") for member in self._members]
        try:
            states = StopSignal().results(calls, PROGRESS_SECONDS)
        except (TandemError, TimeoutError):
            return []
        names = (f"{worker.island} {_name(worker)}" for worker in self._workers)
        return [(name, *state) for name, state in zip(names, states, strict=False)]

    def release(self, prefix: str) -> None:
        """Ends the requests of a lost gateway, whose ids begin with `prefix`. From any thread.

        Senders come first: receivers may reuse pages once senders have answered that they write no more.
        """
        quiet = self._try(Role.PREFILL, "release", prefix)
        self._try(Role.DECODE, "release", prefix, quiet)

    def end_other_ranks(self, lost: ProcessEnded) -> None:
        """Kills the other ranks of the worker whose process has ended: without it they answer nobody any more."""
        workers = list(zip(self._workers, self._members, strict=False))
        pes = {worker.pe for worker, member in workers if member.name == lost.name}
        for worker, member in workers:
            if worker.pe in pes and member.name != lost.name:
                member.kill()

    def end(self, gently: bool) -> None:
        """Ends the processes. gently: they first close what they hold, as an unbroken island can. Idempotent."""
        if gently:
            self._stop_gently(self._members)
        if self._group is not None:
            self._group.end()
            self._group, self._members = None, []

    @property
    def host(self) -> str:
        """The address of the host whose processes these are, or of all hosts; empty before launch()."""
        return ", ".join(dict.fromkeys(member.host for member in self._members))

    @property
    def cut_off(self) -> frozenset[int]:
        """PEs of workers that have ended themselves, because their hosts were silent for too long."""
        seconds = self._config.recovery.silent_seconds
        members = zip(self._workers, self._members, strict=False)
        return frozenset(worker.pe for worker, member in members if member.silent_seconds > seconds)

    @property
    def worker_token(self) -> str:
        """The token that workers ask for. Benchmarks use it to call them without the gateway."""
        return self._workers[0].token

    def _builds(self, members: Sequence[ActorProcess]) -> list[Future[None]]:
        return [] if self.build_on_hosts is None else self.build_on_hosts(members)

    @property
    def _leaders(self) -> list[WorkerConfig]:
        """Returns each worker by its first rank."""
        return [worker for worker in self._workers if worker.rank == 0]

    @property
    def _ranks(self) -> IslandRanks:
        """The ranks of the workers that the island has now."""
        return IslandRanks(worker.ranks[worker.pe] if worker.ranks else 1 for worker in self._leaders)

    @property
    def _threads(self) -> int:
        return self._workers[0].threads or 1

    def _in_places(self, workers: list[WorkerConfig]) -> list[WorkerConfig]:
        """Returns the workers of a new island, in its places."""
        return workers

    def _spec(self, worker: WorkerConfig) -> ActorSpec:
        name = f"{self._config.name}/{worker.island}.{worker.epoch}/{_name(worker)}"
        place = f"{worker.island}.{worker.epoch}/{worker.pe}" if worker.ranks else ""
        return ActorSpec(name, WorkerActor, worker, worker_modules(worker.device), place)

    def _measure(self, members: Sequence[ActorProcess]) -> int:
        """Returns the number of pages for which each of these members has room. On a GPU they first run their largest
        forward, which has no attention, unless the configuration sets the number."""
        utilization = utilization_to_fill(self._config)
        rooms = [] if utilization is None else self._ask(members, "pages_that_fit", utilization)
        return agreed_pages(self._config, rooms, self._max_model_len)

    def _agree(self, fitting: int, num_pages: int | None) -> int:
        """Returns the pages of every pool. fitting: see _measure(). StartFailed if these are fewer than num_pages."""
        if num_pages is not None and fitting < num_pages:
            raise StartFailed(f"there is room for {fitting} pages; the island had {num_pages} before")
        return num_pages or fitting

    def _join(self) -> None:
        self._all("join", self._open(self._members))

    def _serve(self) -> tuple[WorkerAddress, ...]:
        addresses = self._listen(self._members)
        self.formed = True
        workers = zip(self._workers, addresses, strict=True)
        self._addresses = tuple(self._known(worker, address) for worker, address in workers if worker.rank == 0)
        return self._addresses

    def _open(self, members: Sequence[ActorProcess]) -> list[Any]:
        """Opens the members' memory, and returns their handles."""
        calls = [member.call("open", self.num_pages, self._network.pages(member.host)) for member in members]
        return self._results(calls)

    def _listen(self, members: Sequence[ActorProcess]) -> list[Any]:
        """Makes the members listen, and returns their addresses."""
        return self._results([member.call("serve", *self._network.listening(member.host)) for member in members])

    def _known(self, worker: WorkerConfig, address: str) -> WorkerAddress:
        """Returns the worker's address as the gateway gets it."""
        return self._network.known(WorkerAddress(worker.role, worker.pe, address, worker.token, epoch=worker.epoch))

    def _kept(self, before: "Island") -> list[int | None]:
        """Returns for each process the number of the process of `before` that takes its place: see keep_members(). A
        worker whose number of ranks would change starts anew."""
        now, then = self._ranks, before._ranks
        kept: list[int | None] = []
        roles = [worker.role for worker in before._leaders]
        for pe, old in enumerate(keep_members(roles, self.shape.roles)):
            fits = old is not None and then[old] == now[pe]
            kept += [then.process(old, rank) if fits and old is not None else None for rank in range(now[pe])]
        return kept

    def _all(self, method: str, *arguments: object) -> list[Any]:
        return self._ask(self._members, method, *arguments)

    def _ask(self, members: Sequence[ActorProcess], method: str, *arguments: object) -> list[Any]:
        return self._results([member.call(method, *arguments) for member in members])

    def _results(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """Returns all results. Raises a TandemError as it is, another error as StartFailed."""
        try:
            return self._liveness.results(calls, START_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error

    def _stop_gently(self, members: Sequence[ActorProcess], seconds: float = STOP_SECONDS) -> None:
        with suppress(Exception):  # a process that does not stop by itself is killed next
            StopSignal().results([member.call("stop") for member in members], seconds)

    def _try(self, role: Role, method: str, *arguments: object) -> bool:
        """Calls the method on all members of the role. Returns whether all succeed in time."""
        members = zip(self._workers, self._members, strict=False)
        calls = [member.call(method, *arguments) for worker, member in members if worker.role == role]
        try:
            StopSignal().results(calls, RELEASE_SECONDS)
        except Exception:  # whatever the error was, the members have not confirmed the call
            return False
        return True


def _name(worker: WorkerConfig) -> str:
    rank = f", rank {worker.rank}" if worker.ranks and worker.ranks[worker.pe] > 1 else ""
    return f"{worker.role} (PE {worker.pe}{rank})"
