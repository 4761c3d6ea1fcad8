"""Mutual TLS between the processes of one cluster."""

from dataclasses import dataclass, field

import grpc

SERVER_NAME = "worker.tandem"
"""The name in each worker's certificate: workers are known by their cluster's authority, not by an address."""


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, and the authority whose certificates are trusted. PEM, in memory only."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Makes a server's credentials. Callers must show the same authority's certificate."""
        return grpc.ssl_server_credentials([(self.key, self.certificate)], self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def bracketed(host: str) -> str:
    """Returns an address as it stands before a port."""
    return f"[{host}]" if ":" in host else host
