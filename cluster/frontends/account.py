"""What the cluster says of itself: GetClusterInfo, and half of a scrape."""

import time
from dataclasses import dataclass
from importlib.metadata import version

from tandem.cluster.config import ClusterConfig
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.routing.islands import Islands
from tandem.proto import inference_pb2


@dataclass
class ClusterAccount:
    """Owned by the gateway's event loop. Any process answers for all."""

    config: ClusterConfig
    islands: Islands
    table: GatewayTable
    started: float  # the gateway, in this host's monotonic seconds
    http_address: str = ""  # empty where there is no HTTP server
    scaling: inference_pb2.ScalingInfo | None = None  # what the scaling policy is about; None without one

    async def info(self) -> inference_pb2.ClusterInfo:
        """Asks all workers."""
        islands = await self.islands.info(self.config.island.transport)
        gateways = [self._process_info(process) for process in range(self.table.processes)]
        return inference_pb2.ClusterInfo(
            name=self.config.name,
            version=version("tandem"),
            queued=sum(gateway.queued for gateway in gateways),
            active=sum(gateway.active for gateway in gateways),
            uptime_seconds=time.monotonic() - self.started,
            islands=islands,
            gateway_restarts=sum(gateway.restarts for gateway in gateways),
            http_address=self.http_address,
            gateways=gateways,
            scaling=self.scaling,
        )

    def _process_info(self, process: int) -> inference_pb2.GatewayProcessInfo:
        """pid is 0 while it is started again."""
        columns = (Column.PID, Column.QUEUED, Column.ACTIVE, Column.CALLS, Column.RESTARTS)
        pid, queued, active, calls, restarts = (self.table.of(process, column) for column in columns)
        return inference_pb2.GatewayProcessInfo(
            process=process, pid=pid, queued=queued, active=active, calls=calls, restarts=restarts
        )
