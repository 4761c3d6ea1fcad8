"""Mutual TLS between the PEs of a cluster, from certificates in memory."""

import os
import ssl
from typing import Any

from tandem.transfer.endpoint import PAGES_NAME, Endpoint


def context(endpoint: Endpoint, *, server: bool) -> ssl.SSLContext | None:
    """Makes the TLS context for one side of connections; None without certificates."""
    if not endpoint.authority:
        return None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=endpoint.authority.decode())
    _load(made, endpoint.certificate + endpoint.key)
    if server:
        made.num_tickets = 0  # a client here only writes, and would never read them
    return made


def _load(made: ssl.SSLContext, chain: bytes) -> None:
    """Loads a chain. ssl reads files only; this file is nameless, in memory."""
    fd = os.memfd_create("tandem-pem", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(chain)
        made.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def is_of_a_pe(connection: ssl.SSLSocket) -> bool:
    """Whether the other side's certificate, which the authority has signed, has a PE's name: callers of workers have
    none."""
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    return ("DNS", PAGES_NAME) in names
