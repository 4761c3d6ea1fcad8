"""The cluster's account of itself: GetClusterInfo, and half of a scrape."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tandem import __version__
from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.membership import Outage
from tandem.proto import inference_pb2

Gateways = Sequence[inference_pb2.GatewayProcessInfo]


@dataclass
class ClusterAccount:
    """Owned by the gateway's event loop. Any process answers for all."""

    config: ClusterConfig
    islands: Islands
    table: GatewayTable
    started: float  # the gateway, in this host's monotonic seconds
    host: str  # the address of this host
    elsewhere: Callable[[], Awaitable[Gateways]]  # asks the gateway processes of other hosts
    names: ServedNames
    grpc_address: str = ""
    http_address: str = ""  # empty where there is no HTTP server
    scaling: inference_pb2.ScalingInfo | None = None  # what the scaling policy is about; None without one
    outage: Outage = field(default_factory=Outage)

    async def info(self) -> inference_pb2.ClusterInfo:
        """Asks all workers and the other hosts' gateways."""
        info, elsewhere = await asyncio.gather(self.info_here(), self.elsewhere())
        _add(info, elsewhere)
        return info

    def info_for_keys(self) -> inference_pb2.ClusterInfo:
        """Returns what the holder of a key may know. No worker is asked."""
        uptime = time.monotonic() - self.started
        return inference_pb2.ClusterInfo(
            name=self.config.name, version=__version__, uptime_seconds=uptime, http_address=self.http_address
        )

    async def info_here(self) -> inference_pb2.ClusterInfo:
        """Returns info() with the gateway processes of this host only."""
        info = inference_pb2.ClusterInfo(
            name=self.config.name,
            version=__version__,
            uptime_seconds=time.monotonic() - self.started,
            islands=await self.islands.info(self.config.island.transport),
            http_address=self.http_address,
            scaling=self.scaling,
            starts_nothing=self.outage.reason,
        )
        _name_adapters(info, self.names.adapters)
        _add(info, self.gateways_here())
        return info

    def gateways_here(self) -> list[inference_pb2.GatewayProcessInfo]:
        """Returns the gateway processes of this host."""
        return [self._process_info(process) for process in range(self.table.processes)]

    def _process_info(self, process: int) -> inference_pb2.GatewayProcessInfo:
        """pid is 0 while it is started again."""
        columns = (Column.PID, Column.QUEUED, Column.ACTIVE, Column.CALLS, Column.RESTARTS)
        pid, queued, active, calls, restarts = (self.table.of(process, column) for column in columns)
        return inference_pb2.GatewayProcessInfo(
            process=process,
            pid=pid,
            queued=queued,
            active=active,
            calls=calls,
            restarts=restarts,
            host=self.host,
            address=self.grpc_address,
        )


def _add(info: inference_pb2.ClusterInfo, gateways: Gateways) -> None:
    """Adds the gateways to the list and to its sums."""
    info.gateways.extend(gateways)
    info.queued += sum(gateway.queued for gateway in gateways)
    info.active += sum(gateway.active for gateway in gateways)
    info.gateway_restarts += sum(gateway.restarts for gateway in gateways)


def _name_adapters(info: inference_pb2.ClusterInfo, served: AdapterSet) -> None:
    """Workers know an adapter by the name of the last call that loaded it, even of one that the gateway then refused.
    Of several names for the same weights it gets the first; one without a name keeps the worker's."""
    names = {one.digest: name for name, one in sorted(served.by_name.items(), reverse=True)}
    for one in (held for island in info.islands for worker in island.workers for held in worker.adapters):
        one.name = names.get(one.digest, one.name)
