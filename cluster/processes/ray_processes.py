"""Processes that Ray places and watches."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any

import ray
import ray.exceptions

from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ClusterRunning, RayLost, StartFailed, TandemError
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.processes.leases import Leases
from tandem.cluster.processes.lifeline import Lifeline
from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.own_ray import OwnRay, deferred_signals, prefer_settings, use_loopback
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec, Processes, by_place
from tandem.cluster.processes.ray_access import asked_host, check_ray_answers, hide_token
from tandem.cluster.processes.ray_group import RayGroup, Ties
from tandem.cluster.processes.ray_nodes import (
    PLACEMENT_SECONDS,
    alive_nodes,
    bundles_of,
    check_growth,
    check_there,
    choose_nodes,
    free_places,
    log_folder,
    own_cluster,
    own_node_address,
    process_resources,
    request_nodes,
    sum_of,
)
from tandem.cluster.processes.ray_watch import RayWatch

NAMESPACE = "tandem"
TRY_SECONDS = 5.0  # on one node before trying another: the known room is a moment old
LOCAL_GCS_SECONDS = 300.0  # a GCS of this host comes back only with the raylet, and so with another cluster


class RayProcesses(Processes):
    """Processes on a local Ray, on the Ray at `address`, or on the Ray that this process has joined already.

    Groups are spread over the Ray's nodes.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        beside: bool = False,
        modules: Sequence[str] = (),
        forks: ForkServer | None = None,
    ) -> None:
        """beside: a cluster of the same name may run on that Ray. modules: the modules that processes need most; the
        fork server of this host imports them while Ray starts. forks: that server, if it exists; stop() closes it."""
        self._address = address
        self._modules = modules
        self._forks = forks
        self._suffix = f"+{secrets.token_hex(4)}" if beside else ""  # of names that Ray knows
        self._own: OwnRay | None = None
        self._joined = False
        self._placing = Lock()
        self._groups: list[RayGroup] = []
        self._fixed: list[RayGroup] = []
        self._lifeline = Lifeline()
        self._leases = Leases(10.0, 21.0)
        self._loss = Loss()
        self._watch: RayWatch | None = None

    def start(self, cluster: str, num_cpus: int | None) -> None:
        prefer_settings()
        if self._forks is None:
            self._forks = ForkServer(self._modules, cluster)
        if not ray.is_initialized():
            self._connect(num_cpus)
        # Names end with an epoch, so after a restart they would not clash with a second cluster's.
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
        """The Ray's HOST:PORT, after start(). Other clusters can join it there."""
        return ray.get_runtime_context().gcs_address

    def log_folder(self, asked: str | None) -> str:
        """Returns the folder of this host's logs, after start(): `asked`, or Ray's folder of the processes' stderr."""
        return asked or log_folder()

    @property
    def hosts(self) -> Sequence[str]:
        self._loss.check()
        return [node.address for node in alive_nodes()]

    def hosts_for(self, where: Where) -> Sequence[str]:
        self._loss.check()
        here = own_node_address()
        return [node.address for node in alive_nodes() if where.fits(node, here)]

    def check_room(self, processes: int, *, gpus: int) -> None:
        check_there([process_resources(gpus)] * processes)

    def free_places(self, most: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> int:
        self._loss.check()
        return free_places(most, bundles_of(process_resources(gpus), places), where)

    def ask_for_places(self, groups: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> None:
        self._loss.check()
        request_nodes(groups, bundles_of(process_resources(gpus), places), where)

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> "RayGroup":
        self._loss.check()
        resources = process_resources(gpus)
        bundles = bundles_of(resources, [len(run) for run in by_place(specs)])
        with self._placing:  # islands that start at once must not count on the same room
            self._groups, self._fixed = (
                [group for group in known if group.members] for known in (self._groups, self._fixed)
            )
            deadline = time.monotonic() + PLACEMENT_SECONDS
            while True:
                hosts = self._choose_hosts(bundles, where, deadline)
                more = partial(self._choose_hosts, where=where) if where.spread else None
                growth = partial(self._check_growth, resources, where if more else Where(address=hosts[0]))
                ties = Ties(self._lifeline.path, self._leases, self._loss, self._fork_address)
                group = RayGroup(resources, hosts[0], ties, growth, more, self._suffix)
                try:
                    group.start(specs, hosts, threads=threads, seconds=TRY_SECONDS)
                    break
                except StartFailed:
                    if time.monotonic() >= deadline:
                        raise
            # Gateways, whose hosts are given, do not count for the spread.
            (self._fixed if where.here or where.address else self._groups).append(group)
        return group

    def _check_growth(self, need: dict[str, float], where: Where, now: int, more: int) -> None:
        held: dict[str, dict[str, float]] = {}
        for group in (*self._groups, *self._fixed):
            for member in group.members:
                held[member.host] = sum_of([held.get(member.host, {}), group.resources])
        check_growth(now, more, need, where, held)

    def _choose_hosts(self, bundles: Sequence[dict[str, float]], where: Where, deadline: float) -> list[str]:
        """Chooses hosts for a group, or for the places that a group grows by."""
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
        if self._forks is not None:  # its other clients end with their lifeline
            self._forks.close()
            self._forks = None

    @property
    def _fork_address(self) -> str:
        assert self._forks is not None, "start() comes first"
        return self._forks.address

    def _connect(self, num_cpus: int | None) -> None:
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        with deferred_signals(joins=self._address is not None) as came:
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
