"""Keeps the gateway running, on the same port."""

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from tandem.cluster.actors import GatewayActor
from tandem.cluster.config import RecoverySection
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError
from tandem.cluster.gateway import GatewaySettings, attempt_prefix
from tandem.cluster.liveness import Liveness
from tandem.cluster.membership import Membership
from tandem.cluster.processes import ActorSpec, Processes, ProcessGroup
from tandem.cluster.stop_signal import Stopping, StopSignal
from tandem.cluster.supervisor import Supervisor

SERVE_SECONDS = 120.0
STOP_SECONDS = 30.0


class GatewaySupervisor(Supervisor):
    """release is given the prefix of request ids that workers may still hold for a gateway that is gone."""

    def __init__(
        self,
        processes: Processes,
        settings: GatewaySettings,
        membership: Membership,
        release: Callable[[str], None],
        recovery: RecoverySection,
        failed: Callable[[TandemError], None],
    ) -> None:
        super().__init__("the gateway", recovery, failed)
        self._processes = processes
        self._settings = settings
        self._membership = membership
        self._release = release
        self._group: ProcessGroup | None = None
        self.grace = 1.0  # seconds that calls under way have when the gateway is told to stop
        self.address = ""

    def _begin(self) -> None:
        settings = self._settings
        name = f"{settings.cluster}/gateway.{settings.incarnation}"
        self._group = self._processes.start_group([ActorSpec(name, GatewayActor, settings)], gpus=0, threads=1)
        (gateway,) = self._group.members
        self._liveness = Liveness(self._group.members, self._recovery.unresponsive_seconds, self._stop)
        try:
            (self.address,) = self._liveness.results([gateway.call("serve")], SERVE_SECONDS)
            self._liveness.results(self._membership.attach(gateway), SERVE_SECONDS)
        except (TandemError, Stopping):
            raise
        except Exception as error:
            raise StartFailed(f"{type(error).__name__}: {error}") from error
        self._settings = replace(settings, port=int(self.address.rpartition(":")[2]))

    def _watch(self) -> NoReturn:
        self._liveness.watch()

    def _clear(self) -> None:
        self._membership.detach()
        if self._group is not None:
            self._group.end()
        incarnation = self._settings.incarnation
        self._release(attempt_prefix(incarnation))
        self._settings = replace(self._settings, incarnation=incarnation + 1)

    def _end(self) -> None:
        if self._group is not None:
            try:
                calls = [member.call("stop", self.grace) for member in self._group.members]
                StopSignal().results(calls, STOP_SECONDS + self.grace)
            except (ProcessEnded, TimeoutError, RuntimeError):
                pass  # what does not stop by itself is killed next
            self._group.end()
