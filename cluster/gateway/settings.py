"""The settings that a gateway process starts with, and the addresses that it answers."""

from dataclasses import dataclass, field

from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.peers.peer_server import HOST
from tandem.cluster.served_model import ServedModel
from tandem.workers.ports.tls import Identity

READ_BY = (  # whose functions read long requests
    "tandem.cluster.frontends.embedding.embeddings",
    "tandem.cluster.frontends.embedding.rerank",
    "tandem.cluster.frontends.openai.tokenization",
    "tandem.cluster.frontends.responses.body",
    "tandem.cluster.frontends.anthropic.count",
)


@dataclass(frozen=True)
class GatewaySettings:
    """Everything a gateway process needs to know to start."""

    config: ClusterConfig
    model: ServedModel  # without pages where the gateway starts beside the workers; Gateway.start() then gets them
    port: int
    http_port: int | None  # None: no HTTP
    metrics_port: int | None  # None: no port of its own
    token_seconds: float | None  # the bound of roles that are not split; None where they are
    warm_up: bool
    security: ServerSecurity
    process: int = 0  # counted from 0
    incarnation: int = 1  # of the process, counted from 1
    processes: int = 1
    num_islands: int = 1
    table: str = ""  # path of the processes' table; empty for one process without a supervisor
    peer_token: str = field(default="", repr=False)  # by which the processes know each other
    started: float = 0.0  # when the first process was, in this host's monotonic seconds; 0: now
    number: int = 0  # of this host's gateway, see GatewayHost
    node: str = HOST  # the address of this host, as other hosts know it
    adapters: AdapterSet = field(default_factory=AdapterSet)  # as of the start
    peers: Identity | None = field(default=None, repr=False)  # shown to gateways of other hosts; None: there are none

    @property
    def origin(self) -> int:
        """The origin of this process's claims. No other process has the same."""
        return self.number * 64 + self.process  # gateway.processes is at most 64

    @property
    def attempt_prefix(self) -> str:
        """The prefix of the request ids that this start of this process gives to workers."""
        return f"{self.number}-{self.process}.{self.incarnation}."

    @property
    def shares_ports(self) -> bool:
        """Returns whether other processes may listen on its ports: of this cluster, and of one that replaces it."""
        return bool(self.table)


@dataclass(frozen=True)
class GatewayAddresses:
    """A gateway's addresses, HOST:PORT. http and metrics are None without such a port."""

    grpc: str
    http: str | None = None
    metrics: str | None = None  # where it has a port of its own
    peer: str = ""  # for gateway processes of other hosts; empty where there are none
