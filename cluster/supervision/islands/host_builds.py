"""Kernels that other hosts than the launcher's compile while their workers start."""

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import ActorProcess, Processes

SECTIONS = {"model", "cache", "island", "scheduler", "speculation", "adapters"}  # what kernels depend on
log = logging.getLogger(__name__)


class HostBuilds:
    """Asks one worker of each host, by WorkerActor.build(), and again after that worker has ended. Any thread may call
    it."""

    def __init__(self, config: ClusterConfig, processes: Processes) -> None:
        """processes: after their start."""
        self._order = json.dumps(config.model_dump(mode="json", include=SECTIONS))
        self._own = frozenset(processes.hosts_for(Where(here=True)))
        self._lock = threading.Lock()
        self._hosts: dict[str, Future[None]] = {}

    def begin(self, members: Sequence[ActorProcess]) -> list[Future[None]]:
        """Begins to compile on those hosts of the members that have not begun. One future for each host: it is done
        once the host's workers can load the kernels, or can compile the rest themselves. It never has an exception."""
        with self._lock:
            asked = {member.host: member for member in members if member.host not in self._own}
            for host in asked.keys() - self._hosts.keys():
                self._hosts[host] = Future()
            waits = {host: self._hosts[host] for host in asked}
            fresh = [host for host, done in waits.items() if not done.running() and not done.done()]
            for host in fresh:
                waits[host].set_running_or_notify_cancel()
        for host in fresh:
            asked[host].call("build", self._order).add_done_callback(partial(self._built, host, waits[host]))
        return list(waits.values())

    def _built(self, host: str, done: Future[None], call: "Future[list[str]]") -> None:
        error = call.exception()
        for line in [f"{type(error).__name__}: {error}"] if error is not None else call.result():
            log.warning("not built ahead on %s: %s", host, line)
        if error is not None:
            with self._lock:  # the next worker there is asked
                self._hosts.pop(host, None)
        done.set_result(None)
