"""Keeps the gateway running, on the same ports, and takes the scale orders that reach it."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

from tandem.cluster.config import RecoverySection
from tandem.cluster.errors import StartFailed, TandemError
from tandem.cluster.gateway import GatewayAddresses, GatewaySettings, attempt_prefix
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome
from tandem.cluster.supervision.actors import GatewayActor
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tandem.cluster.supervision.supervisor import RETRY_SECONDS, Supervisor

SERVE_SECONDS = 120.0
STOP_SECONDS = 30.0
HTTP_SERVER = "tandem.cluster.frontends.http.server"
ORDER_SECONDS = 120.0  # much longer than the gateway takes to say that there is none
log = logging.getLogger(__name__)


class GatewaySupervisor(Supervisor):
    """release is given the prefix of request ids that workers may still hold for a gateway that is gone; scale is given
    the orders that the gateway took, and does not block."""

    def __init__(
        self,
        processes: Processes,
        settings: GatewaySettings,
        membership: Membership,
        release: Callable[[str], None],
        scale: Callable[[ScaleOrder], Future[ScaleOutcome]],
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
    ) -> None:
        super().__init__("the gateway", recovery, failed)
        self._processes = processes
        self._settings = settings
        self._membership = membership
        self._release = release
        self._scale = scale
        self._group: ProcessGroup | None = None
        self._served = False
        self.grace = 1.0  # seconds that calls under way have when the gateway is told to stop
        self.addresses = GatewayAddresses("")

    def _begin(self) -> None:
        settings = self._settings
        name = f"{settings.cluster}/gateway.{settings.incarnation}"
        modules = () if settings.http_port is None else (HTTP_SERVER,)
        specs = [ActorSpec(name, GatewayActor, settings, modules)]
        self._group = self._processes.start_again(self._group, specs, gpus=0, threads=1)
        (gateway,) = self._group.members
        self._liveness = Liveness(self._group.members, self._recovery, self._stop)
        try:
            (self.addresses,) = self._liveness.results([gateway.call("serve")], SERVE_SECONDS)
            self._liveness.results(self._membership.attach(gateway), SERVE_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error
        http_port = None if self.addresses.http is None else _port(self.addresses.http)
        self._settings = replace(settings, port=_port(self.addresses.grpc), http_port=http_port)
        self._served = True

    def _watch(self) -> NoReturn:
        assert self._group is not None, "_begin() comes first"
        (gateway,) = self._group.members
        while True:
            order = self._next_order(gateway)
            if order is not None:
                self._scale(order).add_done_callback(partial(_answer, gateway, order.number))

    def _next_order(self, gateway: ActorProcess) -> ScaleOrder | None:
        try:
            (order,) = self._liveness.results([gateway.call("next_order")], ORDER_SECONDS)
            return order
        except (TandemError, Stopping):
            raise
        except Exception as error:  # it was stopped for a while, say: how long it may be silent is seen to elsewhere
            log.warning("the gateway did not say whether there is an order: %s", error)
            self._stop.wait_any((), RETRY_SECONDS)
            return None

    def _clear(self) -> None:
        self._membership.detach()
        if self._group is not None and not self._served:  # its place may be why
            self._group.end()
            self._group = None
        self._served = False
        incarnation = self._settings.incarnation
        self._release(attempt_prefix(incarnation))
        self._settings = replace(self._settings, incarnation=incarnation + 1)

    def _end(self) -> None:
        if self._group is not None:
            with suppress(Exception):  # what does not stop by itself is killed next
                calls = [member.call("stop", self.grace) for member in self._group.members]
                StopSignal().results(calls, STOP_SECONDS + self.grace)
            self._group.end()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _answer(gateway: ActorProcess, number: int, done: Future[ScaleOutcome]) -> None:
    error = done.exception()
    gateway.call("answer_order", number, done.result() if error is None else error)
