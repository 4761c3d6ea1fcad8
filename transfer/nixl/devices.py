"""The network devices and protocols of UCX, which NIXL uses: RDMA, and the device of the endpoint's address."""

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from tandem.transfer.endpoint import Endpoint
from tandem.transfer.errors import TransportError

RDMA = Path("/sys/class/infiniband")
GDR = Path("/dev/gdrdrv")  # lets a CPU copy from a GPU's memory
SEGMENT = "512k"  # what TCP sends of a GPU's memory at a time: each is a copy to the host, which UCX waits for
IPV6 = Path("/proc/net/if_inet6")
GET_ADDRESS = 0x8915  # SIOCGIFADDR


def settings(endpoint: Endpoint, *, cuda: bool) -> dict[str, str]:
    """Returns UCX's variables. Without any one of them it would listen on every address of the host. TransportError.

    No protocol maps or enters another process's memory, as `cma` and `posix` do: such a write needs no connection, so
    nothing could end it with its epoch. cuda: whether pages are on a GPU.
    """
    address = ip_address(endpoint.host)
    rdma = [] if address.is_loopback else sorted(device.name for device in RDMA.glob("*"))
    copies = ["cuda_copy", *(["gdr_copy"] if GDR.exists() else [])] if cuda else []
    protocols = ["tcp", *(["ib"] if rdma else []), *copies]
    segments = dict.fromkeys(("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"), SEGMENT) if cuda else {}
    return segments | {
        "UCX_TLS": ",".join(protocols),
        "UCX_NET_DEVICES": ",".join([interface_of(endpoint.host), *(f"{device}:1" for device in rdma)]),
        "UCX_TCP_AF_PRIO": "inet6" if address.version == 6 else "inet",
    }


def interface_of(host: str) -> str:
    """The network interface whose first address that is. TransportError where none has it."""
    address = ip_address(host)
    names = [name for _, name in socket.if_nameindex()]
    if address.is_loopback:
        return "lo"
    found = [name for name in names if address in _addresses(name)]
    if not found:
        raise TransportError(f"endpoint.host is {host}; it must be the first address of {', '.join(names)}")
    return found[0]


def _addresses(interface: str) -> list[IPv4Address | IPv6Address]:
    found: list[IPv4Address | IPv6Address] = []
    if IPV6.exists():
        lines = map(str.split, IPV6.read_text().splitlines())
        found += [ip_address(bytes.fromhex(line[0])) for line in lines if line[5] == interface]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # it may have no IPv4 address
        answer = fcntl.ioctl(asking, GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        found.append(ip_address(answer[20:24]))
    return found
