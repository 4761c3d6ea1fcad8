"""Keeps one host's gateway processes running, on the same ports, and takes the orders that reach them."""

import logging
import math
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError
from tandem.cluster.frontends.orders import Order
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.peers.hosts import GatewayHost
from tandem.cluster.peers.table import GatewayTable
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.routing.membership import Membership
from tandem.cluster.supervision.gateway_actor import GatewayActor
from tandem.cluster.supervision.gateways.host_share import (
    FarShare,
    HostCounts,
    HostShare,
    OwnShare,
    ShareOrder,
    ShareOwner,
)
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.process_modules import gateway_modules
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tandem.cluster.supervision.supervisor import RETRY_SECONDS, Supervisor

TakeOrder = Callable[[Order], Future[Any]]
"""A function that carries an order out without blocking, and returns its outcome."""

SERVE_SECONDS = 120.0
STOP_SECONDS = 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewayShape:
    """The number of a host's gateway processes, and of the islands that they may serve at a time.

    num_pages: of each worker. Processes start before it is known, and serve once it is.
    """

    processes: int
    num_islands: int
    num_pages: Future[int]


@dataclass(eq=False)
class _Gateway:
    """One gateway process, in any incarnation."""

    settings: GatewaySettings
    member: ActorProcess | None = None
    serves: bool = False
    peer: str = ""  # where processes of other hosts find it

    @property
    def spec(self) -> ActorSpec:
        settings = self.settings
        number = f"{settings.number}-" if settings.number else ""
        name = f"{settings.config.name}/gateway.{number}{settings.process}.{settings.incarnation}"
        has_http = settings.http_port is not None or settings.metrics_port is not None
        return ActorSpec(name, GatewayActor, settings, gateway_modules(has_http))


class GatewaySupervisor(Supervisor):
    """Restarts a lost process alone, while the others serve. All processes of a lost host are restarted once the host
    is back.

    release is given the prefix of request ids that workers may still hold for a process that is gone; orders takes the
    orders that a process received.
    """

    def __init__(
        self,
        processes: Processes,
        settings: GatewaySettings,
        shape: GatewayShape,
        membership: Membership,
        release: Callable[[str], None],
        orders: TakeOrder,
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
        beside: Set[int] = frozenset(),
        *,
        is_here: bool = True,
    ) -> None:
        """settings: of a lone process, with the requested ports, and its host's address and number. beside: see
        SharedPorts. is_here: whether the gateway is on this process's host, which then owns the share."""
        super().__init__("the gateway" if is_here else f"the gateway on {settings.node}", recovery, failed)
        self._processes = processes
        self._settings = settings
        self._shape = shape
        self._membership = membership
        self._release = release
        self._take = orders
        self._beside = frozenset(beside)
        self._is_here = is_here
        self._where = Where(here=True) if is_here else Where(address=settings.node)
        self._share: HostShare | None = None
        self._group: ProcessGroup | None = None
        self._gateways: list[_Gateway] = []
        self._incarnation = settings.incarnation  # of those that are started together
        self._orders: dict[Future[Any], ActorProcess] = {}
        self._liveness = Liveness((), recovery, self._stop)
        self._retires = False
        self.grace = 1.0  # seconds that calls under way have when the gateway is told to stop
        self.addresses = GatewayAddresses("")
        self._drain_seconds = settings.config.gateway.drain_seconds
        self._join_seconds += self._drain_seconds

    @property
    def table(self) -> GatewayTable:
        """The counts of this host's gateway processes, read here. Valid from `ready` to the end."""
        assert isinstance(self._share, OwnShare), "the processes share it on this host"
        return self._share.table

    def counts(self) -> "Future[HostCounts] | None":
        """Returns the counts of the host's processes; None while they are away."""
        share = self._share
        return None if share is None else share.counts()

    def give_way(self, grace: float) -> None:
        """Prepares stop(): another gateway serves on the same ports, so this one need not report that it is not
        ready."""
        self.grace, self._drain_seconds = grace, 0.0
        self._join_seconds += grace

    def retire(self) -> None:
        """Stops a gateway while others serve on: they hear that it is gone, and workers forget its requests."""
        self._retires = True
        self.stop()

    def _begin(self) -> None:
        try:
            self._begin_there()
        except TandemError as error:
            if self._is_here or self.ready.done():
                raise
            raise StartFailed(f"the gateway on {self._settings.node}: {error}") from error

    def _begin_there(self) -> None:
        if self._share is None:
            self._share = self._open_share()
            self._gateways = self._plan(self._share)
        started = self._start()
        try:
            (num_pages,) = self._liveness.results([self._shape.num_pages], math.inf)
            addresses = self._liveness.results([member.call("serve", num_pages) for member in started], SERVE_SECONDS)
            told = [call for member in started for call in self._membership.attach(member)]
            self._liveness.results(told, SERVE_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error
        self.addresses = next(iter(addresses), self.addresses)
        for member, address in zip(started, addresses, strict=True):
            (gateway,) = (one for one in self._gateways if one.member is member)
            gateway.serves, gateway.peer = True, address.peer
        self._tell_hosts()
        self._orders |= {member.call("next_order"): member for member in started}

    def _open_share(self) -> HostShare:
        settings, shape = self._settings, self._shape
        order = ShareOrder(
            settings.config.gateway.host,
            settings.port,
            settings.http_port,
            (settings.config.metrics.host, settings.metrics_port),
            self._beside,
            shape.processes,
            shape.num_islands,
        )
        if self._is_here:
            return OwnShare(order)
        name = f"{settings.config.name}/gateway.{settings.number}-share.{self._incarnation}"
        spec = ActorSpec(name, ShareOwner, order)
        group = self._processes.start_group([spec], gpus=0, threads=1, where=self._where)
        self._liveness.add(group.members)
        try:
            (shared,) = self._liveness.results([group.members[0].call("shared")], SERVE_SECONDS)
        except BaseException:
            self._liveness.forget(group.members)
            group.end()
            raise
        return FarShare(group, shared)

    def _plan(self, share: HostShare) -> list[_Gateway]:
        shape, shared = self._shape, share.shared
        one = replace(
            self._settings,
            processes=shape.processes,
            num_islands=shape.num_islands,
            table=shared.table,
            port=shared.port,
            http_port=shared.http_port,
            metrics_port=shared.metrics_port,
            started=time.monotonic(),
            incarnation=self._incarnation,
        )
        return [_Gateway(replace(one, process=process)) for process in range(shape.processes)]

    def _start(self) -> list[ActorProcess]:
        """Starts the processes that do not serve."""
        absent = [gateway for gateway in self._gateways if not gateway.serves]
        for gateway in absent:
            gateway.settings = replace(gateway.settings, adapters=self._membership.adapters)
        if self._group is None:
            self._group = self._processes.start_group(
                [gateway.spec for gateway in absent],
                gpus=0,
                threads=1,
                where=self._where,  # its ports are there
            )
            for gateway, member in zip(absent, self._group.members, strict=True):
                gateway.member = member
        else:
            for gateway in absent:
                gateway.member = self._start_again(self._group, gateway)
        members = [gateway.member for gateway in absent if gateway.member is not None]
        self._liveness.add(members)
        return members

    def _start_again(self, group: ProcessGroup, gateway: _Gateway) -> ActorProcess:
        before, gateway.member = gateway.member, None
        if before is None:
            return group.grow([gateway.spec], threads=1)[0]
        return group.replace_anywhere([before], [gateway.spec], threads=1)[0]

    def _watch(self) -> NoReturn:
        while True:
            for done in self._liveness.wait(self._orders):
                gateway = self._orders.pop(done)
                order = self._order_of(done)
                self._orders[gateway.call("next_order")] = gateway
                if order is not None:
                    self._take(order).add_done_callback(partial(_answer, gateway, order.number))

    def _order_of(self, done: Future[Any]) -> Order | None:
        error = done.exception()
        if error is None:
            return done.result()
        if isinstance(error, ProcessEnded):
            raise error
        # It may have been stopped for a while. Its silence is limited elsewhere.
        log.warning("the gateway did not say whether there is an order: %s", error)
        self._stop.wait_any((), RETRY_SECONDS)
        return None

    def _clear(self, lost: TandemError) -> None:
        if self._share is None:
            return
        if not self._share.is_there():
            self._clear_host(self._share)
            return
        for gateway in self._gateways:
            gone = isinstance(lost, ProcessEnded) and gateway.member is not None and gateway.member.name == lost.name
            if gone or not gateway.serves:
                self._clear_one(gateway, self._share)
        self._tell_hosts()

    def _clear_one(self, gateway: _Gateway, share: HostShare) -> None:
        member, settings = gateway.member, gateway.settings
        if member is not None:
            self._forget(member)
        if member is not None and self._group is not None and not gateway.serves:  # its place may be why
            self._group.shrink([member])
            gateway.member = None
        share.clear(settings.process, settings.incarnation)
        self._release(settings.attempt_prefix)
        gateway.settings = replace(settings, incarnation=settings.incarnation + 1)
        gateway.serves = False

    def _clear_host(self, share: HostShare) -> None:
        """Handles the loss of the share's owner, most likely with its host: no process of the host can go on."""
        gateways, self._gateways = self._gateways, []
        self._tell_hosts()
        for gateway in gateways:
            if gateway.member is not None:
                self._forget(gateway.member)
            self._release(gateway.settings.attempt_prefix)
        self._incarnation = 1 + max(gateway.settings.incarnation for gateway in gateways)
        if isinstance(share, FarShare):
            self._liveness.forget([share.owner])
        self._share, group, self._group = None, self._group, None
        if group is not None:
            group.end()
        share.close()

    def _forget(self, member: ActorProcess) -> None:
        self._membership.detach(member)
        self._liveness.forget([member])
        self._orders = {order: asked for order, asked in self._orders.items() if asked is not member}

    def _tell_hosts(self) -> None:
        """Tells gateways of other hosts the addresses at which serving processes listen for them."""
        if self._settings.peers is None:
            return
        peers = tuple(gateway.peer for gateway in self._gateways if gateway.serves)
        self._membership.update_host(GatewayHost(self._settings.number, self._settings.node, peers))

    def _end(self) -> None:
        if self._retires:
            gateways, self._gateways = self._gateways, []
            self._tell_hosts()
            for gateway in gateways:
                if gateway.member is not None:
                    self._membership.detach(gateway.member)
            self._gateways = gateways
        if self._group is not None:
            serving = [one.member for one in self._gateways if one.serves and one.member is not None]
            if self._drain_seconds:
                drained = [member.call("drain") for member in serving]
                StopSignal().answers(drained, STOP_SECONDS + self._drain_seconds)
            calls = [member.call("stop", self.grace) for member in serving]
            StopSignal().answers(calls, STOP_SECONDS + self.grace)
            self._group.end()  # kills processes that did not stop by themselves
        if self._retires:
            for gateway in self._gateways:
                self._release(gateway.settings.attempt_prefix)
        if self._share is not None:
            self._share.close()


def _answer(gateway: ActorProcess, number: int, done: Future[Any]) -> None:
    error = done.exception()
    gateway.call("answer_order", number, done.result() if error is None else error)
