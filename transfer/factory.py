"""Transports by name."""

from tandem.cache.errors import InvalidArgument
from tandem.transfer.membership import TransportConfig
from tandem.transfer.shared_memory import NAME as SHARED_MEMORY
from tandem.transfer.shared_memory import SharedMemoryTransport
from tandem.transfer.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {SHARED_MEMORY: SharedMemoryTransport}


def create_transport(name: str, config: TransportConfig) -> Transport:
    """A transport that is not open yet; InvalidArgument when no transport has that name."""
    if name not in TRANSPORTS:
        raise InvalidArgument(f"transport is {name!r}; it must be one of {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](config)
