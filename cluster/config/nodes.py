"""Which hosts of a Ray have gateways, as a cluster's YAML says it."""

from typing import Literal

from pydantic import Field

from tandem.cluster.config.units import Section


class GatewayNodes(Section):
    """The part of `gateway` that is about hosts."""

    host: str = "127.0.0.1"
    """address to listen on; other hosts' gateways take 0.0.0.0, :: and loopback as they are, else their hosts' own"""
    nodes: Literal["launcher", "all"] = "launcher"
    """which hosts have a gateway: launcher, the host of `tandem up`; all, each host of the Ray that fits node_resources
    and node_labels, also one that joins later. Any of them serves any island, and each has `processes` of its own"""
    node_resources: dict[str, float] = Field(default={}, max_length=64)
    """Ray's resources that a host must have for a gateway, and how many"""
    node_labels: dict[str, str] = Field(default={}, max_length=64)
    """Ray's labels that a host must have for a gateway, and their values"""
