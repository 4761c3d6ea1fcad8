"""The errors of transfers. Each names the field, the value received and what it must be.

TransferError
├── InvalidPositionMap   a map from the wire does not hold together; it fails one request
├── NoFreeSignal         every mailbox row is held by a reservation; try later
└── TransportError       the transport cannot do what was asked
    ├── MembershipRefused  a handle is of another island, epoch, layout or size
    ├── PeerGone           the process behind a handle has ended
    ├── TransportClosed    called before join() or after close()
    └── TransportTimeout   quiet() reached its deadline; the writes may still land
"""


class TransferError(Exception):
    """Base of all errors of tandem.transfer."""


class InvalidPositionMap(TransferError, ValueError):
    """A position map does not hold together or does not fit the pools; nothing was written."""


class NoFreeSignal(TransferError):
    """Every mailbox row is held by a reservation."""


class TransportError(TransferError):
    """The transport cannot do what was asked."""


class MembershipRefused(TransportError):
    """A handle is not one of this island at this epoch, or its memory has another shape."""


class PeerGone(TransportError):
    """The process behind a handle has ended."""


class TransportClosed(TransportError):
    """The transport has not joined its island yet, or was closed."""


class TransportTimeout(TransportError):
    """quiet() reached its deadline. The writes may still land: their pages must not be reused."""
