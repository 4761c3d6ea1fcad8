"""Watches for the loss of Ray's servers.

    this host's raylet    the cluster ends: Ray's calls of this process end with it
    the GCS               processes live on, and call each other; nothing can be placed until it is back
    … and is back empty   the cluster ends: such a GCS has Ray's nodes and this process end themselves

A GCS comes back with what it knew where Ray was told to store it (RAY_gcs_storage=rocksdb, or Redis).
"""

import socket
from collections.abc import Callable
from threading import Lock
from typing import Any

from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.port_watch import PortWatch
from tandem.cluster.processes.ray_nodes import answered_cluster

PATIENCE_SECONDS = 0.5  # without a server until it counts as lost
ANEW = "its GCS has started anew, without what it knew"
GCS_SECONDS = 1.0  # for a connection to one


class RayWatch:
    """Watches Ray from the constructor to close(). It interrupts and resumes `loss`, which others declare."""

    def __init__(
        self,
        gcs: tuple[str, int],
        raylet: tuple[str, int],
        cluster: Any,
        loss: Loss,
        lost: Callable[[str], None],
        away: Callable[[str], None],
        patience_seconds: float,
    ) -> None:
        """gcs, raylet: host and port. cluster: Ray's id of the cluster.

        patience_seconds: how long a start waits without a GCS until it fails; 0 if nobody would start a GCS again.

        lost: called once, with the reason why the cluster ends. away: called with the reason why nothing can be
        started, and with "" once it can. Threads of the watch call both.
        """
        self._gcs = gcs
        self._name = f"the Ray at {gcs[0]}:{gcs[1]}"
        self._cluster = cluster
        self._loss = loss
        self._lost = lost
        self._away = away
        self._patience_seconds = patience_seconds
        self._is_away = False
        self._lock = Lock()
        back = self._is_back if patience_seconds else None
        self._watches = [
            PortWatch(raylet, PATIENCE_SECONDS, self._raylet_ended),
            PortWatch(gcs, PATIENCE_SECONDS, self._interrupt, back),
        ]

    def close(self) -> None:
        """Idempotent. From any thread."""
        for watch in self._watches:
            watch.close()

    def _interrupt(self) -> None:
        until = "it is back" if self._patience_seconds else "tandem up is started again"
        reason = f"{self._name} has lost its GCS: what runs serves on, and nothing is started until {until}"
        self._is_away = True
        self._loss.interrupt(reason, self._patience_seconds)
        self._away(reason)

    def _is_back(self) -> bool:
        found = answered_cluster(*self._gcs)
        if found is None:
            return False
        if found != self._cluster:
            self._end(ANEW)
            return False
        self._is_away = False
        self._loss.resume()
        self._away("")
        return True

    def _raylet_ended(self) -> None:
        """Handles the end of the raylet. A GCS that is back empty ends the raylets, and this may be seen before the GCS
        was asked."""
        self._end(ANEW if self._is_away and self._is_anew() else "its raylet has ended")

    def _is_anew(self) -> bool:
        try:
            socket.create_connection(self._gcs, GCS_SECONDS).close()
        except OSError:
            return False
        return answered_cluster(*self._gcs) not in (None, self._cluster)

    def _end(self, reason: str) -> None:
        with self._lock:
            lost, self._lost = self._lost, lambda _: None
        lost(f"{self._name} is lost: {reason}")
        self.close()
