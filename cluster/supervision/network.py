"""Connects the gateway to workers, and workers to each other: over loopback, or between hosts by mutual TLS."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import StartFailed
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import LOOPBACK_HOST, Processes
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.workers.ports.tls import Identity

JOIN_POLL_SECONDS = 0.5
log = logging.getLogger(__name__)


def wait_for_hosts(config: ClusterConfig, processes: Processes) -> None:
    """Returns once ray.min_hosts hosts may have an island. StartFailed when they have not joined in ray.join_seconds,
    and at once if none can join."""
    wanted, seconds = config.ray.min_hosts, config.ray.join_seconds
    where = Where(False, config.island.node_resources, config.island.node_labels)
    deadline, said = time.monotonic() + seconds, -1
    while len(there := processes.hosts_for(where)) < wanted:
        count = f"{len(there)} of {wanted} hosts (ray.min_hosts)"
        if all(is_loopback(host) for host in processes.hosts):
            raise StartFailed(f"{count} are there, and none can join a Ray on loopback; give the --address of another")
        if time.monotonic() >= deadline:
            raise StartFailed(f"{count} have joined within {seconds:g} s (ray.join_seconds): {', '.join(there)}")
        if said != len(there):
            said = len(there)
            log.info("waiting for hosts: %s have joined", count)
        time.sleep(JOIN_POLL_SECONDS)


class Network:
    """The network of one run of one cluster. Certificates are made in memory, and travel to processes with their
    arguments."""

    def __init__(self, config: ClusterConfig, processes: Processes | None = None) -> None:
        """processes: after their start; None: only this host."""
        island, hosts = config.island, 1 if processes is None else len(processes.hosts)
        self.spans_hosts = hosts > 1 if island.network == "auto" else island.network == "node"
        self.where = Where(not self.spans_hosts, island.node_resources, island.node_labels, island.span_hosts)
        """The hosts on which islands may be placed."""
        fitting = processes.hosts_for(self.where) if self.spans_hosts and processes is not None else ()
        self.num_hosts = max(1, len(fitting))
        """The number of hosts on which islands may be placed now."""
        self.silent_seconds = config.recovery.silent_seconds if self.spans_hosts else 0.0
        """The seconds for which connections may be silent while a link is down."""
        self._worker: Identity | None = None
        self._gateway: Identity | None = None
        self._issue_pages: Callable[[str], Endpoint] | None = None
        self.peers: Identity | None = None
        """The identity that gateways of several hosts show each other; None if only the launcher's host has a gateway.
        """
        if self.spans_hosts:
            from tandem.cluster.supervision.authority import Authority  # what it needs takes 0.1 s to import

            authority = Authority(config.name)
            self._worker, self._gateway = authority.worker(), authority.gateway()
            # Pages have an authority of their own: workers must not call workers.
            self._issue_pages = Authority(f"{config.name} pages").pages
            if config.gateway.nodes == "all":
                self.peers = Authority(f"{config.name} gateways").peer()

    def listening(self, host: str) -> tuple[str, Identity | None]:
        """Returns the address on which a worker of that host listens, and the identity by which it is known."""
        return (host if self.spans_hosts else LOOPBACK_HOST), self._worker

    def pages(self, host: str) -> Endpoint:
        """Returns where a worker of that host listens for writers of its pages, with a certificate of its own."""
        if self._issue_pages is None:
            return LOOPBACK
        return replace(self._issue_pages(host), silent_seconds=self.silent_seconds)

    def known(self, worker: WorkerAddress) -> WorkerAddress:
        """Adds the identity that a gateway shows the worker."""
        return replace(worker, identity=self._gateway)
