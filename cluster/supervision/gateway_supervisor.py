"""Keeps the gateway's processes running, on the same ports, and takes the scale orders that reach them."""

import logging
import secrets
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from tandem.cluster.config_sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError
from tandem.cluster.gateway import GatewayAddresses, GatewaySettings, attempt_prefix
from tandem.cluster.peers.table import GatewayFile, GatewayTable
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome
from tandem.cluster.supervision.actors import GatewayActor
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.shared_ports import SharedPorts
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tandem.cluster.supervision.supervisor import RETRY_SECONDS, Supervisor

SERVE_SECONDS = 120.0
STOP_SECONDS = 30.0
HTTP_SERVER = "tandem.cluster.frontends.http.server"
TOKEN_BYTES = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewayShape:
    """How many processes the gateway has, and how many islands they may serve at a time."""

    processes: int
    num_islands: int


@dataclass(eq=False)
class _Gateway:
    """One process, in whichever incarnation."""

    settings: GatewaySettings
    member: ActorProcess | None = None
    serves: bool = False

    @property
    def spec(self) -> ActorSpec:
        settings = self.settings
        name = f"{settings.config.name}/gateway.{settings.process}.{settings.incarnation}"
        modules = () if settings.http_port is None and settings.metrics_port is None else (HTTP_SERVER,)
        return ActorSpec(name, GatewayActor, settings, modules)


class GatewaySupervisor(Supervisor):
    """A process that is lost is started again alone, while the others serve.

    release is given the prefix of request ids that workers may still hold for a process that is gone; scale is given
    the orders that a process took, and does not block.
    """

    def __init__(
        self,
        processes: Processes,
        settings: GatewaySettings,
        shape: GatewayShape,
        membership: Membership,
        release: Callable[[str], None],
        scale: Callable[[ScaleOrder], Future[ScaleOutcome]],
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
        beside: Set[int] = frozenset(),
    ) -> None:
        """settings: of one process by itself, with the ports that are asked for. beside: as SharedPorts'."""
        super().__init__("the gateway", recovery, failed)
        self._processes = processes
        self._settings = settings
        self._shape = shape
        self._membership = membership
        self._release = release
        self._scale = scale
        self._beside = beside
        self._ports: SharedPorts | None = None
        self._file = GatewayFile(shape.processes, shape.num_islands)
        self._group: ProcessGroup | None = None
        self._gateways: list[_Gateway] = []
        self._orders: dict[Future[Any], ActorProcess] = {}
        self._liveness = Liveness((), recovery, self._stop)
        self.grace = 1.0  # seconds that calls under way have when the gateway is told to stop
        self.addresses = GatewayAddresses("")
        self._drain_seconds = settings.config.gateway.drain_seconds
        self._join_seconds += self._drain_seconds

    @property
    def table(self) -> GatewayTable:
        """What the gateway's processes count, read here. Valid until the end."""
        return self._file.table

    def give_way(self, grace: float) -> None:
        """Before stop(): another gateway serves on the same ports, so this one need not say that it is not ready."""
        self.grace, self._drain_seconds = grace, 0.0
        self._join_seconds += grace

    def _begin(self) -> None:
        if not self._gateways:
            self._gateways = self._plan()
        started = self._start()
        try:
            addresses = self._liveness.results([member.call("serve") for member in started], SERVE_SECONDS)
            told = [call for member in started for call in self._membership.attach(member)]
            self._liveness.results(told, SERVE_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error
        self.addresses = next(iter(addresses), self.addresses)
        for gateway in self._gateways:
            gateway.serves = True
        self._orders |= {member.call("next_order"): member for member in started}

    def _plan(self) -> list[_Gateway]:
        settings, shape = self._settings, self._shape
        self._ports = SharedPorts(
            settings.config.gateway.host,
            settings.port,
            settings.http_port,
            (settings.config.metrics.host, settings.metrics_port),
            self._beside,
        )
        one = replace(
            settings,
            processes=shape.processes,
            num_islands=shape.num_islands,
            table=self._file.path,
            peer_token=secrets.token_urlsafe(TOKEN_BYTES),
            port=self._ports.port,
            http_port=self._ports.http_port,
            metrics_port=self._ports.metrics_port,
            started=time.monotonic(),
        )
        return [_Gateway(replace(one, process=process)) for process in range(shape.processes)]

    def _start(self) -> list[ActorProcess]:
        """Starts the processes that do not serve."""
        absent = [gateway for gateway in self._gateways if not gateway.serves]
        if self._group is None:
            self._group = self._processes.start_group(
                [gateway.spec for gateway in absent],
                gpus=0,
                threads=1,
                where=Where(here=True),  # its ports are there
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
        return group.replace_anywhere(before, gateway.spec, threads=1)

    def _watch(self) -> NoReturn:
        while True:
            for done in self._liveness.wait(self._orders):
                gateway = self._orders.pop(done)
                order = self._order_of(done)
                self._orders[gateway.call("next_order")] = gateway
                if order is not None:
                    self._scale(order).add_done_callback(partial(_answer, gateway, order.number))

    def _order_of(self, done: Future[Any]) -> ScaleOrder | None:
        error = done.exception()
        if error is None:
            return done.result()
        if isinstance(error, ProcessEnded):
            raise error
        # It was stopped for a while, say: how long it may be silent is seen to elsewhere.
        log.warning("the gateway did not say whether there is an order: %s", error)
        self._stop.wait_any((), RETRY_SECONDS)
        return None

    def _clear(self, lost: TandemError) -> None:
        for gateway in self._gateways:
            gone = isinstance(lost, ProcessEnded) and gateway.member is not None and gateway.member.name == lost.name
            if gone or not gateway.serves:
                self._clear_one(gateway)

    def _clear_one(self, gateway: _Gateway) -> None:
        member, settings = gateway.member, gateway.settings
        if member is not None:
            self._membership.detach(member)
            self._liveness.forget([member])
            self._orders = {order: asked for order, asked in self._orders.items() if asked is not member}
        if member is not None and self._group is not None and not gateway.serves:  # its place may be why
            self._group.shrink([member])
            gateway.member = None
        self._file.table.clear(settings.process, settings.incarnation)
        self._release(attempt_prefix(settings.process, settings.incarnation))
        gateway.settings = replace(settings, incarnation=settings.incarnation + 1)
        gateway.serves = False

    def _end(self) -> None:
        if self._group is not None:
            serving = [one.member for one in self._gateways if one.serves and one.member is not None]
            if self._drain_seconds:
                drained = [member.call("drain") for member in serving]
                StopSignal().answers(drained, STOP_SECONDS + self._drain_seconds)
            calls = [member.call("stop", self.grace) for member in serving]
            StopSignal().answers(calls, STOP_SECONDS + self.grace)
            self._group.end()  # kills what did not stop by itself
        if self._ports is not None:
            self._ports.close()
        self._file.close()


def _answer(gateway: ActorProcess, number: int, done: Future[ScaleOutcome]) -> None:
    error = done.exception()
    gateway.call("answer_order", number, done.result() if error is None else error)
