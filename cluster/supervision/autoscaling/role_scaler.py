"""Looks at the islands that serve, for the policy of roles."""

import time
from collections.abc import Callable

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.peers.table import GatewayTable
from tandem.cluster.routing.membership import IslandState, Membership
from tandem.cluster.scaling import Shape
from tandem.cluster.supervision.autoscaling.role_meter import RoleMeter
from tandem.cluster.supervision.autoscaling.role_policy import RoleChange, RolePolicy
from tandem.cluster.supervision.autoscaling.scaling_policy import Load
from tandem.workers.config import Role


class RoleScaler:
    """Chooses the island that should get another shape. Orders nothing. Not for several threads."""

    def __init__(
        self,
        config: ClusterConfig,
        table: GatewayTable,
        membership: Membership,
        num_pages: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_pages: a worker's present number. clock: see RolePolicy."""
        self._membership = membership
        self._page_size = config.cache.page_size
        self._num_pages = num_pages
        self._meter = RoleMeter(table, config.scaling.up_after_seconds, clock)
        self._policy = RolePolicy(config.scaling, clock)
        self._shapes: dict[str, Shape] = {}  # that islands had when they last served

    def changed(self) -> None:
        """Reports a change of an island's shape to the policy."""
        self._policy.changed()
        self._meter.restart()

    def refused(self) -> None:
        """Reports a refused change to the policy."""
        self._policy.refused()

    def sees_change(self) -> bool:
        """Returns whether an island's shape differs from the last look, by whatever order."""
        shapes = {island.name: _shape(island) for island in self._membership.islands if _is_whole(island)}
        changed = any(self._shapes.get(name, shape) != shape for name, shape in shapes.items())
        self._shapes |= shapes
        return changed

    def look(self, load: Load) -> RoleChange | None:
        """Returns the wanted change. None while an island or a worker starts again or changes, and for the cooldown
        after it."""
        islands = self._membership.islands
        shapes = {island.name: _shape(island) for island in islands}
        if not shapes or not all(map(_is_whole, islands)):
            self.changed()
            return None
        return self._policy.desired(self._meter.read(load, islands, self._num_pages() * self._page_size), shapes)


def _is_whole(island: IslandState) -> bool:
    return bool(island.workers) and not island.missing and not island.leaving


def _shape(island: IslandState) -> Shape:
    roles = [worker.role for worker in island.workers]
    return Shape(roles.count(Role.PREFILL), roles.count(Role.DECODE))
