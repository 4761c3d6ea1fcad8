"""A whole cluster: its islands, its gateways, and the processes that they run in."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from typing import Any

from tandem.cluster.adapters.book import AdapterBook, AdapterOrders
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ConfigError, StartFailed, TandemError
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.processes.processes import Processes
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, Shape
from tandem.cluster.served_model import ServedModel
from tandem.cluster.supervision.autoscaling.autoscaler import Autoscaler, IslandRoom
from tandem.cluster.supervision.autoscaling.load_meter import LoadMeter
from tandem.cluster.supervision.autoscaling.role_scaler import RoleScaler
from tandem.cluster.supervision.gateway_supervisor import GatewayShape, TakeOrder
from tandem.cluster.supervision.gateways.gateway_set import GatewaySet
from tandem.cluster.supervision.island import Island, LoadState
from tandem.cluster.supervision.island_set import IslandSet
from tandem.cluster.supervision.islands.checkpoint import check_model
from tandem.cluster.supervision.islands.disk_room import check_disk_bytes
from tandem.cluster.supervision.islands.elastic_island import ElasticIsland
from tandem.cluster.supervision.islands.host_builds import HostBuilds
from tandem.cluster.supervision.network import Network, wait_for_hosts
from tandem.cluster.supervision.predecessor import Predecessor
from tandem.cluster.supervision.process_modules import process_modules
from tandem.cluster.supervision.process_settings import (
    FIRST_EPOCH,
    check_host_bytes,
    gateway_processes,
    gateway_settings,
    is_elastic,
    max_islands,
)
from tandem.cluster.supervision.shared_ports import check_ports
from tandem.cluster.supervision.start_clock import StartClock
from tandem.cluster.supervision.supervisor import Supervisor

READY_POLL_SECONDS = 0.2
ROOM_SECONDS = 30.0  # from the end of processes until Ray counts their room as free
log = logging.getLogger(__name__)

Progress = Callable[[Sequence[LoadState]], None]


class Cluster:
    """A running cluster. start() returns when requests can come; stop() leaves nothing behind and is idempotent.

    In between, lost processes are started again. start() raises ConfigError, StartFailed, ClusterRunning.
    """

    def __init__(
        self,
        config: ClusterConfig,
        processes: Processes | None = None,
        clock: StartClock | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """predecessor: the running cluster of that name, which ends once this one can serve in its place."""
        if config.model.path is None:
            raise ConfigError("model.path is missing; give --model DIR or set it in the config")
        self._config = config if predecessor is None else predecessor.with_ports(config)
        self._predecessor = predecessor
        self._beside = frozenset[int]() if predecessor is None else predecessor.ports
        self._processes = processes or RayProcesses(modules=process_modules(config))
        self._membership = Membership()
        self._islands: IslandSet | None = None
        self._gateways: GatewaySet | None = None
        self._num_pages = Future[int]()  # of each worker, once they agree
        self._built: Future[None] | None = None
        self._host_builds: HostBuilds | None = None
        self._autoscaler: Autoscaler | None = None
        self._room: IslandRoom | None = None
        self._gives_way = False
        self._failure: Future[None] = Future()
        self.grpc_address = ""
        self.http_address: str | None = None
        self.metrics_address: str | None = None
        self.clock = clock or StartClock()  # of several islands, the slowest one's phases

    def start(self, progress: Progress | None = None, build: Callable[[], Future[None]] | None = None) -> str:
        """Starts the cluster, and returns HOST:PORT of the gateway's gRPC server. progress is called a few times a
        second until all islands serve.

        build: called once the checkpoint has passed its checks. It begins to compile kernels, for which workers wait
        before their first forward. stop() cancels the future. Other hosts compile while their workers start.
        """
        with self.clock.phase("checkpoint"):
            max_model_len = check_model(self._config)
        self._config.security.check()
        check_ports(self._config.gateway, self._config.metrics, self._beside)  # it takes a while until they are opened
        self._built = None if build is None else build()
        try:
            with self.clock.phase("ray"):
                self._processes.start(self._config.name, self._config.ray.num_cpus)
                wait_for_hosts(self._config, self._processes)
            if build is not None:
                self._host_builds = HostBuilds(self._config, self._processes)
            recovery = self._config.recovery
            self._processes.lease(recovery.partition_seconds, recovery.silent_seconds)
            self._processes.watch(self._fail, self._tell_away)
            network = Network(self._config, self._processes)
            self._room = IslandRoom(self._processes, self._config, network.where)
            islands = self._start_islands(max_model_len, network)
            gateways = self._start_gateways(islands, max_model_len, network)  # while the workers start
            self._wait_until_ready(islands.all, lambda: progress and progress(islands.progress()), gateways.all)
            clocks = [island.island.clock for island in islands.all]
            self.clock.seconds |= max(clocks, key=lambda clock: sum(clock.seconds.values())).seconds
            with self.clock.phase("gateway"):
                self._num_pages.set_result(islands.num_pages)
                self._wait_until_ready(gateways.all, lambda: None)
                gateways.watch()
                addresses = gateways.addresses[0]
                self.grpc_address, self.http_address = addresses.grpc, addresses.http
                self.metrics_address = addresses.metrics
            if self._predecessor is not None:
                with self.clock.phase("replacement"):
                    self._replace(self._predecessor, islands)
            self._start_autoscaler()
        except BaseException:
            self.stop(1.0 if self._predecessor is None else self._config.recovery.drain_seconds)
            raise
        return self.grpc_address

    def wait(self) -> None:
        """Returns when a new cluster replaces this one. Raises WorkerLost when a part was lost too often, and RayLost
        with the loss of its Ray."""
        self._failure.result()

    def stop(self, grace: float = 1.0) -> None:
        """Ends the gateway, whose running calls have `grace` seconds, then the islands, then what placed them."""
        if self._autoscaler is not None:
            self._autoscaler.stop()
        if self._gateways is not None:
            self._gateways.stop(grace, self._config.recovery.drain_seconds if self._gives_way else None)
        if self._islands is not None:
            self._islands.stop()
        self._autoscaler, self._gateways, self._islands = None, None, None
        if self._built is not None:
            self._built.cancel()
        self._processes.stop()

    @property
    def addresses(self) -> list[GatewayAddresses]:
        """The addresses of each host's gateway, the launcher's own first. Clients may use any."""
        assert self._gateways is not None, "start() comes first"
        return self._gateways.addresses

    @property
    def is_supervised(self) -> bool:
        """True if a thread looks after each island. While their number changes, and at the end, some may be gone."""
        islands = self._islands
        return islands is None or islands.is_changing or all(one.is_alive for one in islands.all)

    @property
    def worker_token(self) -> str:
        """The worker token of the first island."""
        assert self._islands is not None, "start() comes first"
        return self._islands.all[0].island.worker_token

    def offered(self) -> dict[str, Any]:
        """Returns the facts that a new cluster which replaces this one must know. The values are JSON's."""
        assert self._islands is not None, "start() comes first"
        addresses = {"grpc": self.grpc_address, "http": self.http_address, "metrics": self.metrics_address}
        return {
            "islands": self._islands.count,
            "ports": {name: int(there.rpartition(":")[2]) for name, there in addresses.items() if there},
            "ray": self._processes.address,
            "device": self._config.island.device,
            "drain": self._config.recovery.drain_seconds,
        }

    def rest(self, rests: bool) -> None:
        """Stops or restarts the scaling policy, which rests while a new cluster replaces this one."""
        if not rests:
            self._start_autoscaler()
        elif self._autoscaler is not None:
            self._autoscaler.stop()
            self._autoscaler = None

    def scale_islands(self, number: int) -> None:
        """Changes the number of islands, and returns when so many serve. Raises a TandemError if they keep serving as
        before."""
        if self._islands is None:
            raise StartFailed("the cluster stops")
        if number != self._islands.count:
            self._islands.scale(ScaleOrder(0, "", None, None, number)).result()

    def give_way(self) -> None:
        """Makes wait() return. stop() then gives running calls recovery.drain_seconds. From any thread."""
        self._gives_way = True
        if not self._failure.done():
            self._failure.set_result(None)

    def _replace(self, old: Predecessor, islands: IslandSet) -> None:
        """Takes over islands one by one if there is no room for more next to the old ones."""
        wanted = self._config.num_islands
        while islands.count < wanted and (old.islands > 1 or self._free(wanted - islands.count)):
            self.scale_islands(islands.count + self._room_beside(old, wanted - islands.count))
        log.info("this cluster serves in place of the old one (%s), which now ends", old.words)
        old.end()
        try:
            while islands.count < wanted:
                self.scale_islands(islands.count + self._room_beside(old, wanted - islands.count))
        except TandemError as error:  # the old cluster is gone, so this one serves with its own islands
            log.warning("%d islands of num_islands %d serve: %s", islands.count, wanted, error)

    def _room_beside(self, old: Predecessor, most: int) -> int:
        """Returns for how many islands there is room, `most` at most. If there is room for none, the old cluster gives
        up an island.

        StartFailed when it has no more to give.
        """
        deadline = time.monotonic() + (0.0 if old.islands else ROOM_SECONDS)
        while not (free := self._free(most)):
            if time.monotonic() < deadline:
                time.sleep(READY_POLL_SECONDS)
                continue
            if not old.islands:
                raise StartFailed(f"there is room for {free} more")
            old.give_up()
            deadline = time.monotonic() + ROOM_SECONDS
        return free

    def _free(self, most: int) -> int:
        assert self._room is not None, "the processes come first"
        return self._room.free(most)

    def _start_islands(self, max_model_len: int, network: Network) -> IslandSet:
        self._check_room()
        island_of = partial(self._island, max_model_len, network)
        self._islands = IslandSet(self._config, island_of, self._membership, self._fail)
        count, old = self._config.num_islands, self._predecessor
        if old is not None:
            old.check_ray(self._processes.address, self._config.island.device)
            count = self._room_beside(old, count)
        self._islands.start(count)
        return self._islands

    def _check_room(self) -> None:
        """Checks all islands' room at once: a later island would fail after earlier ones have loaded weights."""
        section, islands = self._config.island, self._config.num_islands
        try:
            self._processes.check_room(self._config.processes, gpus=1 if section.device == "cuda" else 0)
        except StartFailed as error:
            each = f"island.num_prefill {section.num_prefill} and island.num_decode {section.num_decode}"
            raise StartFailed(f"num_islands is {islands}, each with {each}: {error}") from error
        if len(self._processes.hosts) == 1:  # the memory of other hosts is not known here
            check_host_bytes(self._config)
            check_disk_bytes(self._config)

    def _island(self, max_model_len: int, network: Network, name: str, epoch: int, shape: Shape) -> Island:
        section = self._config.island.model_copy(update=asdict(shape))
        config = self._config.model_copy(update={"island": section})
        kind = ElasticIsland if is_elastic(config) else Island
        island = kind(self._processes, config, max_model_len, name, epoch, network)
        island.built = self._built
        if self._host_builds is not None:
            island.build_on_hosts = self._host_builds.begin
        if epoch == FIRST_EPOCH:
            island.clock.listener = self.clock.listener
        return island

    def _start_gateways(self, islands: IslandSet, max_model_len: int, network: Network) -> GatewaySet:
        """Begins to start the gateways. They have their ports and imports, and serve once the workers agree on their
        pages."""
        settings = gateway_settings(self._config, ServedModel.of_config(self._config, max_model_len))
        self._gateways = GatewaySet(
            self._processes,
            settings,
            GatewayShape(gateway_processes(self._config), max_islands(self._config), self._num_pages),
            network,
            self._membership,
            islands.release,
            self._taker(islands, settings),
            self._fail,
            self._beside,
        )
        self._gateways.start()
        return self._gateways

    def _taker(self, islands: IslandSet, settings: GatewaySettings) -> TakeOrder:
        """Returns the function that carries orders out, from any thread."""
        book = AdapterBook(self._config.adapters.max_adapters, settings.adapters)
        adapters = AdapterOrders(book, self._membership.update_adapters)
        self._membership.update_adapters(settings.adapters)
        return lambda order: islands.scale(order) if isinstance(order, ScaleOrder) else adapters.take(order)

    def _start_autoscaler(self) -> None:
        section, islands, room = self._config.scaling, self._islands, self._room
        acts = section.is_automatic or section.moves_roles
        if not acts or self._gateways is None or islands is None or room is None:
            return
        table = self._gateways.table
        meter = LoadMeter(table, section.up_after_seconds)
        roles = None
        if section.moves_roles:
            roles = RoleScaler(self._config, table, self._membership, lambda: islands.num_pages)
        self._autoscaler = Autoscaler(self._config, islands, meter, room, self._membership.update_scaling, roles=roles)
        self._autoscaler.start()

    def _wait_until_ready(
        self, parts: Sequence[Supervisor], look: Callable[[], object], beside: Sequence[Supervisor] = ()
    ) -> None:
        """Waits for the parts. look: called while they are not ready. beside: parts whose failure ends the wait,
        too."""
        pending = {part.ready for part in parts}
        while pending:
            look()
            done, pending = wait(pending, timeout=READY_POLL_SECONDS)
            if self._failure.done():
                self._failure.result()
            for ready in (*done, *(part.ready for part in beside if part.ready.done())):
                ready.result()

    def _tell_away(self, reason: str) -> None:
        if reason:
            log.warning(reason)
        else:
            log.info("Ray's GCS is back: processes can be started again")
        self._membership.update_outage(reason)

    def _fail(self, error: TandemError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
