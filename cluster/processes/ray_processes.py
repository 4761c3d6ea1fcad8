"""Processes that Ray places and watches. The only user of ray."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from threading import Lock, current_thread, main_thread
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, TRITON_CACHE
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ClusterRunning, ProcessEnded, StartFailed
from tandem.cluster.processes.actor_server import pack
from tandem.cluster.processes.fork_server import ForkServer
from tandem.cluster.processes.forked_actor import ForkedActor, open_answer
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.processes.ray_access import check_ray_answers, hide_token

NAMESPACE = "tandem"
CPU_FRACTION = 0.1  # Ray's unit of accounting; what a worker may really use is its number of threads
PLACEMENT_SECONDS = 30
NODE_FRACTION = 0.001  # of the resource that every node has under its own name: who asks for it is placed there
CALLS_AT_A_TIME = 8  # two of them wait for ever: for the end, and for orders
IMPORT_SECONDS = 600.0  # recovery.stalled_seconds is over before, unless it is longer
END_SECONDS = 10.0  # a killed process gives back its GPU's memory before it has ended
_numbers = count(1)  # of placement groups
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through Ray's object store


class RayProcesses(Processes):
    """Processes on a local Ray, or on the Ray at `address`, or on the one that this process has joined already."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._owns_ray = False
        self._placing = Lock()

    def start(self, cluster: str, num_cpus: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets any other process of the machine go first
        if not ray.is_initialized():
            self._connect(num_cpus)
        # Names end with an epoch: a cluster that has restarted something would not clash with a second one by itself.
        if any(name.startswith(f"{cluster}/") for name in ray.util.list_named_actors()):
            raise ClusterRunning(cluster, None, None)

    @property
    def address(self) -> str:
        """This Ray's HOST:PORT, after start(). Other clusters can join it there."""
        return ray.get_runtime_context().gcs_address

    def check_room(self, processes: int, *, gpus: int) -> None:
        _check_there([_resources(gpus)] * processes)

    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int) -> "RayGroup":
        resources = _resources(gpus)
        with self._placing:  # islands that start at once must not count on the same room
            (whole,) = _place([resources] * len(specs), [f"{cluster_of(specs[0].name)}/room"], together=True)
            host = _host_of(whole)
            remove_placement_group(whole)
            group = RayGroup(resources | {host: NODE_FRACTION})
            group.grow(specs, threads=threads)
        return group

    def stop(self) -> None:
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _connect(self, num_cpus: int | None) -> None:
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            options |= {
                "address": "local",  # else Ray joins one that it finds
                "num_cpus": num_cpus or os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            if self._address != "auto":  # Ray finds it
                host = self._address.rpartition(":")[0].strip("[]")
                # Where a host says that it is this one, Ray asks at the address that others know it by.
                check_ray_answers(self._address, ray.util.get_node_ip_address() if is_loopback(host) else host)
            options["address"] = self._address
        try:
            with _sigterm_kept():
                ray.init(**options)
        except Exception as error:  # Ray raises bare ones, where its own processes are too slow to start
            reason = (str(error) or type(error).__name__).splitlines()[0]
            if self._address is None:
                raise StartFailed(f"a local Ray cannot be started: {reason}") from error
            raise StartFailed(
                f"the Ray at {self._address!r} cannot be joined: {reason}; it must run there, and ~/.ray/auth_token be "
                "the token that it asks for: RAY_AUTH_MODE=token shows it, RAY_AUTH_MODE=disabled does not"
            ) from error
        self._owns_ray = True
        hide_token()


class RayGroup(ProcessGroup):
    """Actors on one host. Each has its own placement group, which can be given back alone."""

    def __init__(self, resources: dict[str, float]) -> None:
        """resources: of each member; they name the host."""
        self._resources = resources
        self._placed: dict[RayActor, PlacementGroup] = {}

    @property
    def members(self) -> list["RayActor"]:
        return list(self._placed)

    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> list["RayActor"]:
        started: list[RayActor] = []
        unused = _place([self._resources] * len(specs), [spec.name for spec in specs], together=False)
        try:
            for spec in specs:
                started.append(self._start(spec, unused[0], threads))
                self._placed[started[-1]] = unused.pop(0)
        except BaseException:
            for placed in unused:
                remove_placement_group(placed)
            self.shrink(started)
            raise
        return started

    def shrink(self, members: Sequence[ActorProcess]) -> None:
        gone = [member for member in self._placed if member in members]
        _end([member.process_host for member in gone])
        for member in gone:
            member.kill()
            remove_placement_group(self._placed.pop(member))

    def restart(self, specs: Sequence[ActorSpec]) -> None:
        self.shrink(self.members[len(specs) :])
        self._start_in_places(self.members, specs)

    def replace(self, member: ActorProcess, spec: ActorSpec) -> "RayActor":
        places = [known for known in self._placed if known is member]
        if not places:
            raise StartFailed(f"the place of {member.name} was given back")
        (started,) = self._start_in_places(places, [spec])
        return started

    def _start_in_places(self, members: Sequence["RayActor"], specs: Sequence[ActorSpec]) -> list["RayActor"]:
        # All have ended before the first is started: they hold pages of each other, and memory of their GPUs.
        if not _end([member.process_host for member in members]):
            raise StartFailed("a process that was killed, or its process host, does not answer")
        started = [RayActor(spec.name, old.process_host) for spec, old in zip(specs, members, strict=True)]
        asked = [
            new.process_host.start.remote(spec.name, pack((spec.kind, spec.argument)))
            for spec, new in zip(specs, started, strict=True)
        ]
        try:
            ray.get(asked, timeout=END_SECONDS)
        except (ray.exceptions.RayError, StartFailed) as error:
            raise StartFailed(f"a process cannot be started in the process host of another: {error}") from error
        for new, old in zip(started, members, strict=True):
            self._placed[new] = self._placed.pop(old)
        return started

    def _start(self, spec: ActorSpec, placed: PlacementGroup, threads: int) -> "RayActor":
        options = {
            "name": spec.name,
            "num_cpus": CPU_FRACTION,
            "num_gpus": self._resources.get("GPU", 0),
            "max_restarts": 0,  # a lone restart cannot rejoin its island
            "max_concurrency": CALLS_AT_A_TIME,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=0),
            # Threads that spin while idle would take the cores from the other workers of this machine.
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # who asked for no GPU sees none
                    **{name: os.environ[name] for name in (KERNEL_CACHE, TRITON_CACHE) if name in os.environ},
                }
            },
        }
        modules = (spec.kind.__module__, *spec.modules)
        try:
            start = pack((spec.kind, spec.argument))
            handle = ray.remote(ProcessHost).options(**options).remote(modules, spec.name, start)
        except ValueError as error:
            raise ClusterRunning(cluster_of(spec.name), None, None) from error
        return RayActor(spec.name, handle)


class ProcessHost:
    """The process that Ray runs, with a GPU and cores of its own. It forks one member's process after another.

    It passes messages on as bytes: to read them it would need the imports of both ends.
    """

    def __init__(self, modules: Sequence[str], name: str, start: bytes) -> None:
        self._server = ForkServer(modules, f"{cluster_of(name)}/fork server")
        self._actor: ForkedActor = self._server.fork(name, start, IMPORT_SECONDS)

    def ready(self) -> None:
        """Answered once the constructor is through."""

    def start(self, name: str, start: bytes) -> None:
        """After end()."""
        self._actor = self._server.fork(name, start, IMPORT_SECONDS)

    def call(self, name: str, payload: bytes) -> bytes:
        """As ForkedActor.relay(). ProcessEnded for a call to an earlier process."""
        actor = self._actor
        if actor.name != name:
            raise ProcessEnded(name, "another process has replaced it")
        return actor.relay(payload).result()

    def end(self) -> bool:
        """Kills the process. Whether it has ended; idempotent."""
        self._actor.kill()
        return self._actor.join(END_SECONDS)


class RayActor(ActorProcess):
    """An actor behind a ProcessHost. A thread of Ray's fills the futures."""

    def __init__(self, name: str, process_host: Any) -> None:
        """process_host: a handle of the ProcessHost that runs this actor, or soon will."""
        self.name = name
        self.process_host = process_host
        self._started_as = name

    def there(self) -> Future[None]:
        return self.process_host.ready.remote().future()

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        raw = self.process_host.call.remote(self._started_as, pack((method, arguments))).future()
        raw.add_done_callback(lambda done: _fill(answer, done, self.name))
        return answer

    def kill(self) -> None:
        """Kills the process host, too: the cause of a hang may lie there."""
        ray.kill(self.process_host)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keeps this process's SIGTERM handler: Ray would set one that aborts the process."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if current_thread() is main_thread():
            signal.signal(signal.SIGTERM, kept)


def _resources(gpus: int) -> dict[str, float]:
    """The resources of one process."""
    return {"CPU": CPU_FRACTION, "GPU": gpus} if gpus else {"CPU": CPU_FRACTION}


def _check_there(bundles: Sequence[dict[str, float]]) -> str:
    """What the bundles need, in words. StartFailed if Ray does not have it, free or not."""
    needed = {name: round(sum(bundle.get(name, 0) for bundle in bundles), 4) for name in ("CPU", "GPU")}
    text = f"{needed['CPU']:.1f} CPUs" + (f" and {needed['GPU']:.0f} GPUs" if needed["GPU"] else "")
    there = ray.cluster_resources()
    if not there:
        raise StartFailed("Ray has no node any more: its raylet, or the whole of Ray, has ended")
    if any(there.get(name, 0) < amount for name, amount in needed.items()):
        raise StartFailed(f"{text} are needed; Ray has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs")
    return text


def cluster_of(name: str) -> str:
    """The cluster whose name an actor's begins with."""
    return name.partition("/")[0]


def _place(bundles: list[dict[str, float]], names: Sequence[str], *, together: bool) -> list[PlacementGroup]:
    """One placement group for all bundles, or one for each, with these names. StartFailed leaves none."""
    text = _check_there(bundles)
    groups = [bundles] if together else [[bundle] for bundle in bundles]
    # A number follows the name: Ray frees the name of a group that is gone only after a while.
    numbered = [f"{name} #{next(_numbers)}" for name in names]
    placed = [
        placement_group(group, strategy="STRICT_PACK", name=name) for group, name in zip(groups, numbered, strict=True)
    ]
    deadline = time.monotonic() + PLACEMENT_SECONDS
    if not all(group.wait(max(0.0, deadline - time.monotonic())) for group in placed):
        for group in placed:
            remove_placement_group(group)
        raise StartFailed(f"Ray has no node with {text} free")
    return placed


def _host_of(placed: PlacementGroup) -> str:
    """Ray's resource that stands for the group's one node."""
    (node_id,) = set(placement_group_table(placed)["bundles_to_node_id"].values())
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return next(name for name in resources if name.startswith("node:") and not name.endswith("__"))


def _end(process_hosts: Sequence[Any]) -> bool:
    """Whether every process host answers and its process has ended."""
    try:
        return all(ray.get([one.end.remote() for one in process_hosts], timeout=2 * END_SECONDS))
    except ray.exceptions.RayError:
        return False


def _fill(answer: Future[Any], raw: Future[bytes], name: str) -> None:
    """As open_answer(); an error of Ray's becomes ProcessEnded."""
    error = raw.exception()
    if error is None:
        open_answer(answer, raw)
        return
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Where the constructor failed, the exception's own text comes last.
    reason = lines[-1] if "creation task" in lines[0] else lines[0]
    answer.set_exception(ProcessEnded(name, cause.reason if isinstance(cause, ProcessEnded) else reason))
