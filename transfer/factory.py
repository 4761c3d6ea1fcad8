"""Transports by name."""

from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.errors import TransportError
from tandem.transfer.membership import TransportConfig
from tandem.transfer.shared_memory import SharedMemoryTransport
from tandem.transfer.transport import Transport

TRANSPORTS = ("shared_memory", "nvshmem")


def create_transport(name: str, config: TransportConfig) -> Transport:
    """A transport that is not open yet.

    InvalidArgument when no transport has that name; TransportError when its packages are not installed.
    """
    if name not in TRANSPORTS:
        raise InvalidArgument(f"transport is {name!r}; it must be one of {', '.join(TRANSPORTS)}")
    if name == "shared_memory":
        return SharedMemoryTransport(config)
    try:
        from tandem.transfer.nvshmem import NvshmemTransport
    except ImportError as error:
        raise TransportError(
            f"transport is {name!r}, which cannot be loaded: {error}; install tandem[cuda12] or tandem[cuda13]"
        ) from error
    return NvshmemTransport(config)
