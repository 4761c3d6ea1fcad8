"""The part of a cluster's YAML that says which hosts of a Ray cluster have gateways."""

from typing import Literal

from pydantic import Field

from tandem.cluster.config.units import Section


class GatewayNodes(Section):
    """The keys of `gateway` that are about hosts."""

    host: str = "127.0.0.1"
    """address to listen on; gateways on other hosts also use 0.0.0.0, :: or loopback, and otherwise their own host's
    address"""
    nodes: Literal["launcher", "all"] = "launcher"
    """hosts with a gateway. launcher: the host of `tandem up`; all: each host of the Ray that matches node_resources
    and node_labels, also one that joins later. Any gateway serves any island, and each has `processes` processes"""
    node_resources: dict[str, float] = Field(default={}, max_length=64)
    """Ray resources, and how many of each, that a host must have for a gateway"""
    node_labels: dict[str, str] = Field(default={}, max_length=64)
    """Ray labels, with their values, that a host must have for a gateway"""
