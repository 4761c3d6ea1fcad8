"""How the gateway reaches workers: over loopback, or between hosts by mutual TLS."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.cluster.config import ClusterConfig
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import LOOPBACK_HOST
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.workers.tls import Identity


class Network:
    """Of one run of one cluster. Certificates are made in memory, and travel to processes as their arguments do."""

    def __init__(self, config: ClusterConfig, hosts: Sequence[str]) -> None:
        """hosts: the addresses of all there are."""
        island = config.island
        self.spans_hosts = len(hosts) > 1 if island.network == "auto" else island.network == "node"
        self.where = Where(here=not self.spans_hosts, resources=island.node_resources, labels=island.node_labels)
        """Where islands may go."""
        self._worker: Identity | None = None
        self._gateway: Identity | None = None
        if self.spans_hosts:
            from tandem.cluster.supervision.authority import Authority  # what it needs takes 0.1 s to import

            authority = Authority(config.name)
            self._worker, self._gateway = authority.worker(), authority.gateway()

    def listening(self, host: str) -> tuple[str, Identity | None]:
        """What a worker on that host listens on, and by which certificate it is known."""
        return (host if self.spans_hosts else LOOPBACK_HOST), self._worker

    def known(self, worker: WorkerAddress) -> WorkerAddress:
        """With what a gateway shows the worker."""
        return replace(worker, identity=self._gateway)
