"""Transports by name. A new one is a module with its class, and a line in TRANSPORTS."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from tandem.cache.extras import install
from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.errors import TransportError

if TYPE_CHECKING:  # the configuration reads TRANSPORTS, and must not wait for torch
    from tandem.transfer.membership import TransportConfig
    from tandem.transfer.transport import Transport


@dataclass(frozen=True)
class Registration:
    """A transport, which nothing imports before it is created."""

    module: str
    class_name: str
    devices: tuple[str, ...]  # "cpu", "cuda": where its workers may compute
    package: str = ""  # what its module imports of what not all installations have
    install: str = ""  # what brings it
    spans_hosts: bool = False
    elastic: bool = False  # see Transport


TRANSPORTS: Mapping[str, Registration] = MappingProxyType(
    {
        "shared_memory": Registration("tandem.transfer.shared_memory", "SharedMemoryTransport", ("cpu",)),
        "tcp": Registration("tandem.transfer.tcp.transport", "TcpTransport", ("cpu",), spans_hosts=True, elastic=True),
        "nixl": Registration(
            "tandem.transfer.nixl.transport",
            "NixlTransport",
            ("cpu", "cuda"),
            package="nixl",
            install=install("nixl"),
            spans_hosts=True,
            elastic=True,
        ),
        "nvshmem": Registration(
            "tandem.transfer.nvshmem.transport",
            "NvshmemTransport",
            ("cuda",),
            package="nvshmem",
            install=install("cuda13", "cuda12"),
        ),
    }
)


def create_transport(name: str, config: "TransportConfig") -> "Transport":
    """A transport that is not open yet.

    InvalidArgument when no transport has that name; TransportError when its packages are not installed.
    """
    if name not in TRANSPORTS:
        raise InvalidArgument(f"transport is {name!r}; it must be one of {', '.join(TRANSPORTS)}")
    one = TRANSPORTS[name]
    try:
        module = import_module(one.module)
    except ImportError as error:
        raise TransportError(f"transport is {name!r}, which cannot be loaded: {error}; {one.install}") from error
    return getattr(module, one.class_name)(config)
