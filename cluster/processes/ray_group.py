"""Actors of process hosts that Ray has placed together."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, TRITON_CACHE
from tandem.cluster.errors import ClusterRunning, ProcessEnded, StartFailed, TandemError
from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.forked_actor import open_answer
from tandem.cluster.processes.leases import HeldLease, Leases
from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.placement import CPU_FRACTION
from tandem.cluster.processes.process_host import END_SECONDS, ProcessHost, check_niceness
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, ProcessGroup, by_place, cluster_of
from tandem.cluster.processes.ray_nodes import PLACEMENT_SECONDS, bundles_of, on_node, own_node_address, place

ChooseHosts = Callable[..., list[str]]
"""A function that calls choose_nodes() with bundles and a deadline."""
CheckGrowth = Callable[[int, int], None]
"""A function that calls check_growth() with the number of processes, and how many more are wanted."""
CALLS_AT_A_TIME = 8  # two of them wait for ever: for the end, and for orders
LEASE_CALLS = "lease"  # a thread of their own


@dataclass(frozen=True)
class Ties:
    """The ways in which process hosts and their launcher notice each other's end.

    lifeline: the path of the launcher's, for process hosts on its own host. leases: for the others. forks: the address
    of the fork server on each host.
    """

    lifeline: str
    leases: Leases
    loss: Loss
    forks: str


class RayGroup(ProcessGroup):
    """Actors on one host, or on several. Actors of one place share a placement group, which can be given back alone."""

    def __init__(
        self,
        resources: dict[str, float],
        host: str,
        ties: Ties,
        check_growth: CheckGrowth,
        choose_hosts: ChooseHosts | None = None,
        suffix: str = "",
    ) -> None:
        """resources: of each member. host: the address of the first member's node. choose_hosts: places further
        members; None: all go to the first one's node. suffix: of their names in Ray."""
        self._suffix = suffix
        self._check_growth = check_growth
        self.resources = resources
        self._host = host
        self._choose_hosts = choose_hosts
        self._ties = ties
        self._placed: dict[RayActor, PlacementGroup] = {}

    @property
    def members(self) -> list["RayActor"]:
        return list(self._placed)

    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> list["RayActor"]:
        if specs:
            self._check_growth(len(self._placed), len(specs))
        needs, deadline = self._needs(by_place(specs)), time.monotonic() + PLACEMENT_SECONDS
        hosts = [self._host] * len(needs)
        if self._choose_hosts is not None:
            hosts = self._choose_hosts(needs, deadline=deadline)
        return self.start(specs, hosts, threads=threads, seconds=PLACEMENT_SECONDS)

    def start(
        self, specs: Sequence[ActorSpec], hosts: Sequence[str], *, threads: int, seconds: float
    ) -> list["RayActor"]:
        """Starts processes as grow() does. hosts: one for each place."""
        self._ties.loss.check()
        started: list[RayActor] = []
        together = by_place(specs)
        needs = [need | on_node(host) for need, host in zip(self._needs(together), hosts, strict=True)]
        unused = place(needs, [run[0].name for run in together], seconds)
        try:
            for run, host in zip(together, hosts, strict=True):
                for spec in run:
                    started.append(self._start(spec, unused[0], threads, host))
                    self._placed[started[-1]] = unused[0]
                unused.pop(0)
        except BaseException:
            for placed in unused:
                remove_placement_group(placed)
            self.shrink(started)
            raise
        return started

    def _needs(self, together: Sequence[Sequence[ActorSpec]]) -> list[dict[str, float]]:
        return bundles_of(self.resources, [len(run) for run in together])

    def shrink(self, members: Sequence[ActorProcess]) -> None:
        gone = [member for member in self._placed if member in members]
        self._end([member for member in gone if member.there().done()])  # others have no process yet
        for member in gone:
            placed = self._placed.pop(member)
            if member.lease is not None:
                self._ties.leases.drop(member.lease)
            if not self._ties.loss.reason:  # else nobody would answer, and the process ends by its lifeline
                unused = None if placed in self._placed.values() else placed
                self._ties.loss.when_there(partial(_give_back, member, unused))

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
            RayActor(spec.name, old.process_host, self._ties.loss, old.host, old.lease)
            for spec, old in zip(specs, members, strict=True)
        ]
        asked = [
            new.process_host.start.remote(spec.name, pack((spec.kind, spec.argument))).future()
            for spec, new in zip(specs, started, strict=True)
        ]
        try:
            self._ties.loss.results(asked, started[0].name, END_SECONDS)
        except (ray.exceptions.RayError, TandemError, TimeoutError) as error:
            raise StartFailed(f"a process cannot be started in the process host of another: {error}") from error
        for new, old in zip(started, members, strict=True):
            self._placed[new] = self._placed.pop(old)
        return started

    def _start(self, spec: ActorSpec, placed: PlacementGroup, threads: int, host: str) -> "RayActor":
        options = {
            "name": spec.name + self._suffix,
            "num_cpus": CPU_FRACTION,
            "num_gpus": self.resources.get("GPU", 0),
            "max_restarts": 0,  # a lone restart cannot rejoin its island
            "max_concurrency": CALLS_AT_A_TIME,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=0),
            # Threads that spin while idle would take the cores from the other workers of this machine.
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor that asked for no GPU sees none
                    **{name: os.environ[name] for name in (KERNEL_CACHE, TRITON_CACHE) if name in os.environ},
                }
            },
        }
        modules = (spec.kind.__module__, *spec.modules)
        seconds = None if host == own_node_address() else self._ties.leases.seconds
        try:
            start = pack((spec.kind, spec.argument))
            arguments = (modules, spec.name, start, self._ties.lifeline, self._ties.forks, seconds)
            host_class = cast(Any, ray.remote)(concurrency_groups={LEASE_CALLS: 1})(ProcessHost)
            handle = host_class.options(**options).remote(*arguments)
        except ValueError as error:
            raise ClusterRunning(cluster_of(spec.name), None, None) from error
        handle.niceness.remote().future().add_done_callback(partial(check_niceness, host))
        actor = RayActor(spec.name, handle, self._ties.loss, host)
        if seconds is not None:
            renew: Any = handle.renew.options(concurrency_group=LEASE_CALLS)
            actor.lease = HeldLease(actor.there(), lambda: renew.remote().future())
            self._ties.leases.hold(actor.lease)
        return actor

    def _end(self, members: Sequence["RayActor"]) -> bool:
        """Ends the members. Returns whether every process host answers and its process has ended."""
        if self._ties.loss.reason:
            return False  # they end by their lifeline, and a gateway's has something to say before
        patience = self._ties.leases.seconds
        heard = [member for member in members if member.silent_seconds <= patience]  # others have ended
        try:
            calls = [member.process_host.end.remote().future() for member in heard]
            ended = self._ties.loss.results(calls, "a process host", 2 * END_SECONDS)
            return all(ended) and len(heard) == len(members)
        except (ray.exceptions.RayError, TandemError, TimeoutError):
            return False


class RayActor(ActorProcess):
    """An actor with its ProcessHost. A thread of Ray's fills the futures."""

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

    @property
    def is_held_up(self) -> bool:
        return self._loss.is_away and not self._there.done()

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


def _give_back(member: RayActor, placed: PlacementGroup | None) -> None:
    """Gives a member's place back. placed: None while other members use it."""
    member.kill()
    if placed is not None:
        remove_placement_group(placed)


def _fill(answer: Future[Any], raw: Future[bytes], name: str) -> None:
    """Fills `answer` as open_answer() does; an error of Ray's becomes ProcessEnded. After a loss `answer` is there
    already."""
    with suppress(InvalidStateError):
        _fill_first(answer, raw, name)


def _fill_first(answer: Future[Any], raw: Future[bytes], name: str) -> None:
    error = raw.exception()
    if error is None:
        open_answer(answer, raw)
        return
    cause = getattr(error, "cause", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # If the constructor failed, the exception's own text comes last.
    reason = lines[-1] if "creation task" in lines[0] else lines[0]
    answer.set_exception(ProcessEnded(name, cause.reason if isinstance(cause, ProcessEnded) else reason))
