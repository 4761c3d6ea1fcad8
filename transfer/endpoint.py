"""The address at which a PE listens for the other PEs of its island."""

from dataclasses import dataclass, field
from ipaddress import ip_address

PAGES_NAME = "pages.tandem"
"""The name in each PE's certificate: PEs are known by their cluster's authority, not by an address."""


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of a transport with connections; others need none. Plain values: it travels to the worker's process.

    host: the address to listen on. authority, certificate, key: PEM, in memory only. With them each side of a
    connection shows a certificate of that authority, and all is encrypted. Without them host is a loopback address.
    silent_seconds: how long the other side may be silent until a connection counts as lost.
    """

    host: str = "127.0.0.1"
    authority: bytes = b""
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    silent_seconds: float = 30.0

    @property
    def is_guarded(self) -> bool:
        """Whether nobody else can read what is sent there."""
        return bool(self.authority) or ip_address(self.host).is_loopback


LOOPBACK = Endpoint()
