"""The errors of the control plane and its clients. Each names the field, the value and what it must be.

TandemError             UsageError ConfigError RuntimeDirError ClusterRunning ClusterNotRunning StopTimedOut StartFailed
│                                                                                                        └── NoRoom
│                                                                                                            └── RayAway
│                       ProcessEnded WorkerLost RayLost ReshapeFailed BuildFailed BenchmarkFailed MissingPlots
└── CallError           InvalidRequest Overloaded DeadlineExceeded Unavailable Unauthenticated Cancelled
                        AttemptsExhausted Superseded ScaleRefused AdapterRefused ServerError
                        Forbidden                                                └── NotFinite
                        InvalidRequest ── UnknownModel   Overloaded ── RateLimited
WorkerCallError         WorkerFull WorkerTimedOut ForwardFailed LogitsNotFinite RequestRefused
└── PlacementLost       WorkerUnreachable AdapterMissing

Inside the gateway a call to a worker fails with a WorkerCallError. statuses.py maps both trees to gRPC and HTTP.
"""

from collections.abc import Sequence
from typing import ClassVar

from tandem.cluster.errors.limit_state import LimitState


class TandemError(Exception):
    """Base of all errors that a user of tandem is meant to read."""


class UsageError(TandemError):
    """A command line cannot be understood."""


class ConfigError(TandemError, ValueError):
    """A cluster's YAML or an override cannot be used; one line a finding."""


class RuntimeDirError(TandemError):
    """The per-user folder for running clusters is not safe to use."""


class ClusterRunning(TandemError):
    """A cluster of that name already runs."""

    def __init__(self, name: str, pid: int | None, grpc_address: str | None) -> None:
        where = f"with pid {pid or 'unknown'}, " + (f"at grpc={grpc_address}" if grpc_address else "still starting")
        super().__init__(f"name is {name!r}: a cluster of that name runs {where}; stop it or choose another name")
        self.name = name
        self.pid = pid
        self.grpc_address = grpc_address


class ClusterNotRunning(TandemError):
    """No cluster of that name runs."""


class StopTimedOut(TandemError):
    """A cluster did not end in time."""


class StartFailed(TandemError):
    """A worker or the gateway did not start."""


class NoRoom(StartFailed):
    """No host has room for it now."""


class RayAway(NoRoom):
    """Ray's GCS does not answer: what runs goes on, and nothing is started until it is back."""


class ProcessEnded(TandemError):
    """A process ended before it had answered a call."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} ended: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type["ProcessEnded"], tuple[str, str]]:
        return type(self), (self.name, self.reason)  # it travels between processes


class BuildFailed(TandemError):
    """Something could not be compiled."""


class WorkerLost(TandemError):
    """A process ended, or fell silent, more often than a cluster may restart it."""


class RayLost(TandemError):
    """The Ray that runs a cluster's processes has ended, and they end with it."""


class ReshapeFailed(TandemError):
    """An island did not come about in the shape that was ordered, and its old epoch was over: it is started again."""


class BenchmarkFailed(TandemError):
    """A benchmark did not run to its end."""


class MissingPlots(TandemError):
    """matplotlib is not installed."""


class CallError(TandemError):
    """A call to a gateway failed."""


class InvalidRequest(CallError, ValueError):
    """The request can never succeed as it is."""


class UnknownModel(InvalidRequest):
    """No model and no adapter of that name is served."""


class Overloaded(CallError):
    """The queue is full; the same call may succeed later, best after retry_after_seconds."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RateLimited(Overloaded):
    """The caller's key has used up a limit of its own, or no slot is free to count it. The same call may succeed after
    retry_after_seconds."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0, states: Sequence[LimitState] = ()) -> None:
        """states: of the limits that the key has."""
        super().__init__(message, retry_after_seconds)
        self.states = tuple(states)


class Forbidden(CallError):
    """The caller is known, and may not do this."""


class DeadlineExceeded(CallError, TimeoutError):
    """The call's deadline passed."""


class Unavailable(CallError):
    """No gateway answers there."""


class Unauthenticated(CallError):
    """The gateway asks for a token, and got none or another."""


class Cancelled(CallError):
    """The call was cancelled."""


class AttemptsExhausted(CallError):
    """The request was placed as often as it may be, and its workers were lost each time."""


class Superseded(CallError):
    """A later call has taken the request over."""


class ScaleRefused(CallError):
    """An island cannot be given that shape, and keeps serving as before."""


class AdapterRefused(CallError):
    """An adapter cannot be added or removed, or is no longer what the request began with."""


class ServerError(CallError):
    """A worker or the gateway failed while it served the request."""


class NotFinite(ServerError):
    """The model gave NaN or infinity for the request's next token."""


class WorkerCallError(Exception):
    """The worker answered with an error."""

    client_error: ClassVar[type[CallError]] = ServerError
    """The error that the gateway's client gets where nothing else helps."""


class PlacementLost(WorkerCallError):
    """The worker is gone or has dropped the request, which can go on elsewhere."""


class WorkerUnreachable(PlacementLost):
    """No worker of that epoch answers there."""


class AdapterMissing(PlacementLost):
    """The worker does not hold the request's adapter; another may."""


class WorkerFull(WorkerCallError):
    """The worker has no room now."""

    client_error = Overloaded


class WorkerTimedOut(WorkerCallError):
    """The worker did not answer in time."""

    client_error = DeadlineExceeded


class ForwardFailed(WorkerCallError):
    """A forward failed; another request in it may be at fault."""


class LogitsNotFinite(WorkerCallError):
    """The model gave NaN or infinity for the request's next token, and would again."""

    client_error = NotFinite


class RequestRefused(WorkerCallError):
    """The worker refuses the request as it is."""

    client_error = InvalidRequest
