"""What a worker answers when it does not do what it was asked. service/status.py has the gRPC status of each.

WorkerError
├── InvalidCall        the call cannot be right
│   └── BadAdapter          a folder that holds no adapter which can be served
├── AdapterNotHeld     another worker may have the request's adapter
├── NoRoom             try again later
│   └── NoSlot              all slots for adapters are in use
├── Stale              the call is too late
│   ├── StaleReservation
│   └── StaleEpoch
├── PeerLost           nothing is pushed any more in this epoch
├── RankLost           a worker of several ranks has lost one, and ends
├── Aborted, LeaseExpired, CorruptKV, ForwardFailed, WriterNotQuiet    the request ended without its result
│   └── LogitsNotFinite     a ForwardFailed
└── GpuTooSmall, NoRanks    the worker cannot start
"""

from concurrent.futures import Future
from typing import ClassVar


class WorkerError(Exception):
    """Base of all errors of a worker's loops."""


class InvalidCall(WorkerError, ValueError):
    """A value in the call is not acceptable; repeating the call will not help."""


class BadAdapter(InvalidCall):
    """The folder holds no LoRA adapter that this worker can serve."""


class AdapterNotHeld(WorkerError):
    """The worker does not hold the LoRA adapter of the request: it was never loaded here, or has been removed."""

    def __init__(self, digest: bytes) -> None:
        super().__init__(f"adapter {digest.hex()} is not held here: never loaded, or removed")


class NoRoom(WorkerError):
    """Pages, signal slots or sequences are taken; the same call may succeed later.

    coming: ends when running requests have given room up for this one; None where they do not. would_park: whether they
    would, if the call allowed it."""

    coming: "Future[None] | None" = None
    would_park: bool = False
    lacks_slot: ClassVar[bool] = False


class NoSlot(NoRoom):
    """Other requests use all slots for LoRA adapters. Requests without an adapter, or with one in a slot, have room."""

    lacks_slot = True


class Stale(WorkerError):
    """The call speaks of something that is over; nothing was done."""


class StaleReservation(Stale):
    """The reservation was used, recalled, aborted or has expired, or was never made."""


class StaleEpoch(Stale):
    """The call belongs to another incarnation of the island, or of one of its workers."""

    def __init__(self, received: int, current: int, pe: int | None = None) -> None:
        """pe: of the worker whose epoch it is, where that is not the one that was called. It has none while nobody has
        its place: current is 0."""
        if pe is None:
            super().__init__(f"epoch is {received}; this island is at epoch {current}")
        else:
            super().__init__(f"epoch of PE {pe} is {received}; it is at epoch {current}")


class PeerLost(WorkerError):
    """The connection to a peer is lost, and with it the epoch. Another island, or the next epoch, takes the request."""


class RankLost(WorkerError):
    """Another rank of the worker has ended, is silent, or was told to end. This one cannot go on."""


class NoRanks(WorkerError):
    """This machine cannot run a worker of several ranks."""


class Aborted(WorkerError):
    """The request was aborted while the call waited."""


class LeaseExpired(WorkerError):
    """No call waited for the request for as long as its lease; it was stopped."""


class CorruptKV(WorkerError):
    """The KV that arrived is not the KV that was sent; the request ends, the worker goes on."""


class ForwardFailed(WorkerError):
    """The forward that the request was part of raised; the worker goes on."""


def forward_failed(what: str, error: Exception, lost: str = "") -> WorkerError:
    """Returns the error that ends a request whose forward raised. lost: see Engine.lost. A lost rank or peer is the
    worker's end, not the request's."""
    if isinstance(error, RankLost):
        return error
    return PeerLost(f"{what} failed: {lost}") if lost else ForwardFailed(f"{what} failed: {error}")


class LogitsNotFinite(ForwardFailed):
    """The model gave NaN or infinity for a request's next token; the request ends, the others of its forward go on."""

    def __init__(self, request_id: str, position: int) -> None:
        super().__init__(
            f"logits are not finite at token {position} of request {request_id!r}, counted from 0 with its prompt; "
            "its weights are broken, or numbers exceed the model's dtype"
        )


class GpuTooSmall(WorkerError):
    """The weights leave no room for KV pages in what may be used of the GPU."""


class WriterNotQuiet(WorkerError):
    """Writes of a request may still land: its receiver's pages must not be reused. Aborting again asks again."""
