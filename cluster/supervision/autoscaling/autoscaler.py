"""Changes the number of islands, and their shapes, by the scaling policies, while the cluster runs."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import TandemError
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import Processes
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, ScalingState
from tandem.cluster.supervision.autoscaling.load_meter import LoadMeter
from tandem.cluster.supervision.autoscaling.role_policy import RoleChange
from tandem.cluster.supervision.autoscaling.role_scaler import RoleScaler
from tandem.cluster.supervision.autoscaling.scaling_policy import Decision, Load, ScalingPolicy

TICK_SECONDS = 1.0
JOIN_SECONDS = 10.0
log = logging.getLogger(__name__)


class Scaled(Protocol):
    """The islands that a policy adds and removes: IslandSet."""

    @property
    def count(self) -> int: ...
    @property
    def is_changing(self) -> bool: ...
    @property
    def is_reshaping(self) -> bool: ...
    def scale(self, order: ScaleOrder) -> Future[ScaleOutcome]: ...


@dataclass(frozen=True)
class IslandRoom:
    """The room for islands of the configured shape."""

    processes: Processes
    config: ClusterConfig
    where: Where

    def free(self, most: int) -> int:
        """Returns how many more islands have room now, `most` at most."""
        return self.processes.free_places(most, self.config.island.ranks, gpus=self._gpus, where=self.where)

    def ask(self, islands: int) -> None:
        """Asks for hosts with room for so many islands in all. Islands that must be on this host get none by it."""
        if not self.where.here:
            self.processes.ask_for_places(islands, self.config.island.ranks, gpus=self._gpus, where=self.where)

    @property
    def _gpus(self) -> int:
        return 1 if self.config.island.device == "cuda" else 0


class Autoscaler:
    """A thread that looks at the load every TICK_SECONDS. start() → stop(), which is idempotent.

    While the number of islands changes, by whatever order, and for scaling.cooldown_seconds after it, the policy asks
    for nothing. So `tandem scale --islands` holds until the policy has again seen for long enough that another number
    is right. If hosts lack room for all wanted islands, as many start as have room. More hosts are asked for once, and
    later looks find them. Meanwhile the policy may decide anything else.

    Workers that an island lacks come before more islands, and islands end before workers do. While an island has been
    refused workers, more islands come first.
    """

    def __init__(
        self,
        config: ClusterConfig,
        islands: Scaled,
        meter: LoadMeter,
        room: IslandRoom,
        tell: Callable[[ScalingState], None],
        clock: Callable[[], float] = time.monotonic,
        roles: RoleScaler | None = None,
    ) -> None:
        """tell: gets the state whenever it changes. clock: see ScalingPolicy. roles: None keeps shapes."""
        self._section = config.scaling
        self._islands = islands
        self._meter = meter
        self._room = room
        self._tell = tell
        self._clock = clock
        self._roles = roles
        self._reshapes = False  # whether its last order was for another shape
        self._policy = ScalingPolicy(config.scaling, clock)
        self._count = islands.count
        self._change: Future[ScaleOutcome] | None = None
        self._state: ScalingState | None = None
        self._failed = ""  # why its last order was refused
        self._asked = 0  # islands that hosts were asked for; 0: never
        self._wanted_at = 0.0  # when islands last lacked room
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Gives no more orders. An order that was given goes on."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
        if self._asked:
            self._asked = 0
            self._ask(0)

    def look(self) -> None:
        """Looks once, and orders what the policy wants."""
        count = self._islands.count
        self._see_change()
        changed = self._roles is not None and self._roles.sees_change()
        if self._change is not None or self._islands.is_changing or count != self._count or changed:
            self._count = count
            self._restart()
            return
        load = self._meter.read()
        change = self._role_change(load)
        decision = self._policy.desired(load, count)
        if change is not None and (change.grows or decision.islands == count):
            self._reshape(count, change)
            return
        if decision.islands > count:
            self._grow(count, decision)
            return
        self._withdraw(count)
        if decision.islands < count:
            self._order(count, decision.islands, decision)
        else:
            self._show(self._wanted if self._failed else count, self._failed)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self.look()
            except TandemError as error:  # of a lost Ray, which ends the cluster anyway
                self._show(self._islands.count, str(error))
            except Exception:
                log.exception("the scaling policy could not look")

    def _see_change(self) -> None:
        """Forgets its own order once it has ended."""
        if self._change is None or not self._change.done():
            return
        error, self._change = self._change.exception(), None
        self._failed = "" if error is None else str(error)
        if error is None:
            return
        if self._reshapes and self._roles is not None:
            self._roles.refused()
        self._restart()  # it may have been refused at once, and is not given again each second

    def _restart(self) -> None:
        self._policy.changed()
        self._meter.restart()
        if self._roles is not None:
            self._roles.changed()

    def _role_change(self, load: Load) -> RoleChange | None:
        if self._roles is None:
            return None
        if self._islands.is_reshaping:  # by hand
            self._roles.changed()
            return None
        return self._roles.look(load)

    def _reshape(self, count: int, change: RoleChange) -> None:
        prefill, decode = change.shape.num_prefill, change.shape.num_decode
        words = f"island {change.island} forms anew with {prefill} prefill and {decode} decode workers"
        log.info("the scaling policy: %s: %s", words, change.why)
        self._show(count, words)
        self._failed, self._reshapes = "", True
        self._change = self._islands.scale(ScaleOrder(0, change.island, prefill, decode))

    @property
    def _wanted(self) -> int:
        return self._count if self._state is None else self._state.wanted_islands

    def _grow(self, count: int, decision: Decision) -> None:
        wanted = max(decision.islands, self._asked)  # an earlier request was certain: it does not shrink each second
        free = self._room.free(wanted - count)
        if free < wanted - count:
            self._wanted_at = self._clock()
            if self._asked != wanted:
                log.info(
                    "the scaling policy: %d islands instead of %d need more hosts: %s", wanted, count, decision.why
                )
                self._asked = wanted
                self._ask(wanted)
            missing = wanted - count - free
            self._show(wanted, f"waiting for hosts with room for {missing} of them")
        if free:
            self._order(count, count + free, decision, wanted)

    def _withdraw(self, count: int) -> None:
        """Withdraws the request for hosts, once it has been unnecessary for long enough."""
        if self._asked > count and self._clock() - self._wanted_at >= self._section.down_after_seconds:
            self._asked = count
            self._ask(count)

    def _ask(self, islands: int) -> None:
        try:
            self._room.ask(islands)
        except Exception as error:  # Ray's own, of whichever kind: hosts may come without
            log.warning("more hosts cannot be asked for: %s: %s", type(error).__name__, error)

    def _order(self, count: int, islands: int, decision: Decision, wanted: int | None = None) -> None:
        log.info("the scaling policy: %d islands instead of %d: %s", islands, count, decision.why)
        if wanted is None or wanted == islands:
            self._show(islands, "starting them" if islands > count else "ending the newest")
        self._failed, self._reshapes = "", False
        self._change = self._islands.scale(ScaleOrder(0, "", None, None, islands))

    def _show(self, wanted: int, waits_for: str = "") -> None:
        state = ScalingState(self._section.min_islands, self._section.max_islands or wanted, wanted, waits_for)
        if state == self._state:
            return
        if waits_for and (self._state is None or self._state.waits_for != waits_for):
            log.info("the scaling policy wants %d islands: %s", wanted, waits_for)
        self._state = state
        self._tell(state)
