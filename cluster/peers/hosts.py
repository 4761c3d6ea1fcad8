"""The hosts that have gateways, as each gateway process knows them."""

from dataclasses import dataclass

PEER_NAME = "gateway.tandem"
"""The name in each gateway process's certificate: they are known by their cluster's authority, not by an address."""


@dataclass(frozen=True)
class GatewayHost:
    """The gateway of one host. number: its own; another gateway that comes to that host has another one.

    peers: HOST:PORT of its processes' peer servers; empty while none serves.
    """

    number: int
    address: str
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class GatewayHosts:
    """All hosts that have gateways. A higher version replaces a lower one."""

    version: int = 0
    hosts: tuple[GatewayHost, ...] = ()

    def without(self, number: int) -> tuple[GatewayHost, ...]:
        """Returns the hosts without this one."""
        return tuple(host for host in self.hosts if host.number != number)

    def peers_of(self, number: int) -> tuple[str, ...]:
        """Returns the peers of a host; empty if it has no gateway any more."""
        return next((host.peers for host in self.hosts if host.number == number), ())
