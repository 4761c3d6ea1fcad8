"""Processes that Ray places and watches."""

import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, TRITON_CACHE
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ClusterRunning, ProcessEnded, RayLost, StartFailed, TandemError
from tandem.cluster.processes.actor_server import pack
from tandem.cluster.processes.forked_actor import open_answer
from tandem.cluster.processes.leases import HeldLease, Leases
from tandem.cluster.processes.lifeline import Lifeline
from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.own_ray import OwnRay, deferred_signals, prefer_settings, use_loopback
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.process_host import END_SECONDS, ProcessHost, check_niceness
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup, cluster_of
from tandem.cluster.processes.ray_access import asked_host, check_ray_answers, hide_token
from tandem.cluster.processes.ray_nodes import (
    CPU_FRACTION,
    PLACEMENT_SECONDS,
    alive_nodes,
    check_there,
    choose_nodes,
    free_places,
    on_node,
    own_address,
    own_cluster,
    place,
    process_resources,
    request_nodes,
    sum_of,
)
from tandem.cluster.processes.ray_watch import RayWatch

NAMESPACE = "tandem"
TRY_SECONDS = 5.0  # on one node, until another one may do: what is known of their room is a moment old
ChooseHosts = Callable[..., list[str]]
"""choose_nodes() by bundles and deadline."""
CALLS_AT_A_TIME = 8  # two of them wait for ever: for the end, and for orders
LOCAL_GCS_SECONDS = 300.0  # a GCS of this host comes back with the raylet, and so with another cluster, or never
LEASE_CALLS = "lease"  # a thread of their own


class RayProcesses(Processes):
    """Processes on a local Ray, or on the Ray at `address`, or on the one that this process has joined already.

    Groups are spread over the nodes of a Ray that has several.
    """

    def __init__(self, address: str | None = None, *, beside: bool = False) -> None:
        """beside: a cluster of the same name may run on that Ray."""
        self._address = address
        self._suffix = f"+{secrets.token_hex(4)}" if beside else ""  # of names that Ray knows
        self._own: OwnRay | None = None
        self._joined = False
        self._placing = Lock()
        self._groups: list[RayGroup] = []
        self._lifeline = Lifeline()
        self._leases = Leases(10.0, 21.0)
        self._loss = Loss()
        self._watch: RayWatch | None = None

    def start(self, cluster: str, num_cpus: int | None) -> None:
        prefer_settings()
        if not ray.is_initialized():
            self._connect(num_cpus)
        # Names end with an epoch: a cluster that has restarted something would not clash with a second one by itself.
        if not self._suffix and any(name.startswith(f"{cluster}/") for name in ray.util.list_named_actors()):
            raise ClusterRunning(cluster, None, None)

    def watch(self, lost: Callable[[TandemError], None], away: Callable[[str], None]) -> None:
        host, _, port = self.address.rpartition(":")
        here = ray.get_runtime_context().get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
        raylet = node["NodeManagerAddress"], node["NodeManagerPort"]

        def declare(reason: str) -> None:
            self._loss.declare(reason)
            self._leases.close()
            self._lifeline.cut()
            lost(RayLost(f"{reason}; the cluster ends with it, and may be started again"))

        self._watch = RayWatch(
            (host.strip("[]"), int(port)),
            raylet,
            own_cluster(),
            self._loss,
            declare,
            away,
            0.0 if self._own else LOCAL_GCS_SECONDS if host.strip("[]") == raylet[0] else math.inf,
        )

    def lease(self, partition_seconds: float, seconds: float) -> None:
        self._leases = Leases(partition_seconds, seconds)

    @property
    def address(self) -> str:
        """This Ray's HOST:PORT, after start(). Other clusters can join it there."""
        return ray.get_runtime_context().gcs_address

    @property
    def hosts(self) -> Sequence[str]:
        self._loss.check()
        return [node.address for node in alive_nodes()]

    def hosts_for(self, where: Where) -> Sequence[str]:
        self._loss.check()
        here = own_address()
        return [node.address for node in alive_nodes() if where.fits(node, here)]

    def check_room(self, processes: int, *, gpus: int) -> None:
        check_there([process_resources(gpus)] * processes)

    def free_places(self, most: int, processes: int, *, gpus: int, where: Where = ANYWHERE) -> int:
        self._loss.check()
        return min(most, free_places(sum_of([process_resources(gpus)] * processes), where))

    def ask_for_places(self, groups: int, processes: int, *, gpus: int, where: Where = ANYWHERE) -> None:
        self._loss.check()
        request_nodes(groups, sum_of([process_resources(gpus)] * processes), where)

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> "RayGroup":
        self._loss.check()
        bundles = [process_resources(gpus)] * len(specs)
        with self._placing:  # islands that start at once must not count on the same room
            self._groups = [group for group in self._groups if group.members]
            deadline = time.monotonic() + PLACEMENT_SECONDS
            while True:
                hosts = self._choose_hosts(bundles, where, deadline)
                more = partial(self._choose_hosts, where=where) if where.spread else None
                ends = (self._lifeline.path, self._leases, self._loss)
                group = RayGroup(bundles[0], hosts[0], *ends, more, self._suffix)
                try:
                    group.start(specs, hosts, threads=threads, seconds=TRY_SECONDS)
                    break
                except StartFailed:
                    if time.monotonic() >= deadline:
                        raise
            if not (where.here or where.address):  # gateways, whose hosts are given, do not count for the spread
                self._groups.append(group)
        return group

    def _choose_hosts(self, bundles: Sequence[dict[str, float]], where: Where, deadline: float) -> list[str]:
        """For a group, or for what one grows by."""
        hosts = [{member.host for member in group.members} for group in self._groups]
        return choose_nodes(bundles, where, Counter(chain.from_iterable(hosts)), deadline)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._leases.close()
        self._lifeline.cut()
        if self._own is not None:
            self._own.end()
        elif self._joined:
            ray.shutdown()
        self._own, self._joined = None, False

    def _connect(self, num_cpus: int | None) -> None:
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        with deferred_signals() as came:
            if self._address is None:
                self._own = OwnRay(num_cpus, options, came)
            else:
                self._join(self._address, options)
        hide_token()

    def _join(self, address: str, options: dict[str, Any]) -> None:
        if address != "auto":  # Ray finds it
            host = asked_host(address, ray.util.get_node_ip_address())
            check_ray_answers(address, host)
            use_loopback(is_loopback(host))
        try:
            ray.init(address=address, **options)
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise StartFailed(
                f"the Ray at {address!r} cannot be joined: {reason}; it must run there, and ~/.ray/auth_token be "
                "the token that it asks for: RAY_AUTH_MODE=token shows it, RAY_AUTH_MODE=disabled does not"
            ) from error
        self._joined = True


class RayGroup(ProcessGroup):
    """Actors on one host, or on several. Each has its own placement group, which can be given back alone."""

    def __init__(
        self,
        resources: dict[str, float],
        host: str,
        lifeline: str,
        leases: Leases,
        loss: Loss,
        choose_hosts: ChooseHosts | None = None,
        suffix: str = "",
    ) -> None:
        """resources: of each member. host: the address of the first one's node. lifeline: the path of this process's,
        for members on this host. leases: for the others. choose_hosts: where more members go; None: all beside the
        first. suffix: of their names in Ray."""
        self._suffix = suffix
        self._resources = resources
        self._host = host
        self._choose_hosts = choose_hosts
        self._lifeline = lifeline
        self._leases = leases
        self._loss = loss
        self._placed: dict[RayActor, PlacementGroup] = {}

    @property
    def members(self) -> list["RayActor"]:
        return list(self._placed)

    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> list["RayActor"]:
        hosts, deadline = [self._host] * len(specs), time.monotonic() + PLACEMENT_SECONDS
        if self._choose_hosts is not None:
            hosts = self._choose_hosts([self._resources] * len(specs), deadline=deadline)
        return self.start(specs, hosts, threads=threads, seconds=PLACEMENT_SECONDS)

    def start(
        self, specs: Sequence[ActorSpec], hosts: Sequence[str], *, threads: int, seconds: float
    ) -> list["RayActor"]:
        """As grow(), on these hosts."""
        self._loss.check()
        started: list[RayActor] = []
        needs = [self._resources | on_node(host) for host in hosts]
        unused = place(needs, [spec.name for spec in specs], seconds)
        try:
            for spec, host in zip(specs, hosts, strict=True):
                started.append(self._start(spec, unused[0], threads, host))
                self._placed[started[-1]] = unused.pop(0)
        except BaseException:
            for placed in unused:
                remove_placement_group(placed)
            self.shrink(started)
            raise
        return started

    def shrink(self, members: Sequence[ActorProcess]) -> None:
        gone = [member for member in self._placed if member in members]
        self._end([member for member in gone if member.there().done()])  # others have no process yet
        for member in gone:
            placed = self._placed.pop(member)
            if member.lease is not None:
                self._leases.drop(member.lease)
            if not self._loss.reason:  # else nobody would answer, and the process ends by its lifeline
                self._loss.when_there(partial(_give_back, member, placed))

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
        if not self._end(members):
            raise StartFailed("a process that was killed, or its process host, does not answer")
        started = [
            RayActor(spec.name, old.process_host, self._loss, old.host, old.lease)
            for spec, old in zip(specs, members, strict=True)
        ]
        asked = [
            new.process_host.start.remote(spec.name, pack((spec.kind, spec.argument))).future()
            for spec, new in zip(specs, started, strict=True)
        ]
        try:
            self._loss.results(asked, started[0].name, END_SECONDS)
        except (ray.exceptions.RayError, TandemError, TimeoutError) as error:
            raise StartFailed(f"a process cannot be started in the process host of another: {error}") from error
        for new, old in zip(started, members, strict=True):
            self._placed[new] = self._placed.pop(old)
        return started

    def _start(self, spec: ActorSpec, placed: PlacementGroup, threads: int, host: str) -> "RayActor":
        options = {
            "name": spec.name + self._suffix,
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
        seconds = None if host == own_address() else self._leases.seconds
        try:
            start = pack((spec.kind, spec.argument))
            host_class = cast(Any, ray.remote)(concurrency_groups={LEASE_CALLS: 1})(ProcessHost)
            handle = host_class.options(**options).remote(modules, spec.name, start, self._lifeline, seconds)
        except ValueError as error:
            raise ClusterRunning(cluster_of(spec.name), None, None) from error
        handle.niceness.remote().future().add_done_callback(partial(check_niceness, host))
        actor = RayActor(spec.name, handle, self._loss, host)
        if seconds is not None:
            renew: Any = handle.renew.options(concurrency_group=LEASE_CALLS)
            actor.lease = HeldLease(actor.there(), lambda: renew.remote().future())
            self._leases.hold(actor.lease)
        return actor

    def _end(self, members: Sequence["RayActor"]) -> bool:
        """Whether every process host answers and its process has ended."""
        if self._loss.reason:
            return False  # they end by their lifeline, and a gateway's has something to say before
        heard = [member for member in members if member.silent_seconds <= self._leases.seconds]  # others have ended
        try:
            calls = [member.process_host.end.remote().future() for member in heard]
            ended = self._loss.results(calls, "a process host", 2 * END_SECONDS)
            return all(ended) and len(heard) == len(members)
        except (ray.exceptions.RayError, TandemError, TimeoutError):
            return False


class RayActor(ActorProcess):
    """An actor behind a ProcessHost. A thread of Ray's fills the futures."""

    def __init__(self, name: str, process_host: Any, loss: Loss, host: str, lease: HeldLease | None = None) -> None:
        """process_host: a handle of the ProcessHost that runs this actor, or soon will. host: its node's address.
        lease: of a process host on another host."""
        self.name = name
        self.host = host
        self.process_host = process_host
        self.lease = lease
        self._started_as = name
        self._loss = loss
        self._there: Future[None] = process_host.ready.remote().future()

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self.lease is None else self.lease.silent_seconds

    def there(self) -> Future[None]:
        return self._there

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        self._loss.awaited(answer, self.name)
        if answer.done():
            return answer
        raw = self.process_host.call.remote(self._started_as, pack((method, arguments))).future()
        raw.add_done_callback(lambda done: _fill(answer, done, self.name))
        return answer

    def kill(self) -> None:
        """Kills the process host, too: the cause of a hang may lie there."""
        ray.kill(self.process_host)


def _give_back(member: RayActor, placed: PlacementGroup) -> None:
    member.kill()
    remove_placement_group(placed)


def _fill(answer: Future[Any], raw: Future[bytes], name: str) -> None:
    """As open_answer(); an error of Ray's becomes ProcessEnded. After a loss `answer` is there already."""
    with suppress(InvalidStateError):
        _fill_first(answer, raw, name)


def _fill_first(answer: Future[Any], raw: Future[bytes], name: str) -> None:
    error = raw.exception()
    if error is None:
        open_answer(answer, raw)
        return
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # Where the constructor failed, the exception's own text comes last.
    reason = lines[-1] if "creation task" in lines[0] else lines[0]
    answer.set_exception(ProcessEnded(name, cause.reason if isinstance(cause, ProcessEnded) else reason))
