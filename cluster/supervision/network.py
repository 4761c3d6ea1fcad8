"""How the gateway reaches workers: over loopback, or between hosts by mutual TLS."""

from dataclasses import replace

from tandem.cluster.config import ClusterConfig
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import LOOPBACK_HOST, Processes
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.workers.tls import Identity


class Network:
    """Of one run of one cluster. Certificates are made in memory, and travel to processes as their arguments do."""

    def __init__(self, config: ClusterConfig, processes: Processes | None = None) -> None:
        """processes: after their start; None is this host."""
        island, hosts = config.island, 1 if processes is None else len(processes.hosts)
        self.spans_hosts = hosts > 1 if island.network == "auto" else island.network == "node"
        self.where = Where(here=not self.spans_hosts, resources=island.node_resources, labels=island.node_labels)
        """Where islands may go."""
        fitting = processes.hosts_for(self.where) if self.spans_hosts and processes is not None else ()
        self.num_hosts = max(1, len(fitting))
        """On which they may go now."""
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
