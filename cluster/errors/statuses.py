"""Maps each error to its gRPC and HTTP status, and each status to its error. No other file compares codes.

RESOURCE_EXHAUSTED and 429 carry the header retry-after-ms. Over gRPC errors have details for programs, too.
"""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio

from tandem.cluster import errors
from tandem.cluster.errors import CallError, Overloaded, TandemError, WorkerCallError
from tandem.cluster.errors.details import details_of, reason_of

RETRY_AFTER_KEY = "retry-after-ms"
REMOVED = "Stream removed"  # gRPC's text for a call whose connection broke begins so; some versions give UNKNOWN
Code = grpc.StatusCode

# A status stands for the first error that has it.
STATUSES: tuple[tuple[type[CallError], grpc.StatusCode, int], ...] = (
    (errors.InvalidRequest, Code.INVALID_ARGUMENT, 400),
    (errors.UnknownModel, Code.NOT_FOUND, 404),
    (errors.Unauthenticated, Code.UNAUTHENTICATED, 401),
    (errors.ScaleRefused, Code.FAILED_PRECONDITION, 409),
    (errors.AdapterRefused, Code.FAILED_PRECONDITION, 409),
    (Overloaded, Code.RESOURCE_EXHAUSTED, 429),
    (errors.RateLimited, Code.RESOURCE_EXHAUSTED, 429),
    (errors.Forbidden, Code.PERMISSION_DENIED, 403),
    (errors.Cancelled, Code.CANCELLED, 500),
    (errors.ServerError, Code.INTERNAL, 500),
    (errors.NotFinite, Code.DATA_LOSS, 500),
    (errors.AttemptsExhausted, Code.ABORTED, 503),
    (errors.Superseded, Code.ABORTED, 503),
    (errors.Unavailable, Code.UNAVAILABLE, 503),  # over gRPC it comes from the connection, or from a cluster that ends
    (errors.DeadlineExceeded, Code.DEADLINE_EXCEEDED, 504),
)
HTTP_OF_ERROR: dict[type[CallError], int] = {kind: status for kind, _, status in STATUSES}
GRPC_CODES = tuple(sorted({code.name for _, code, _ in STATUSES}))
"""Names of the statuses with which the gateway ends calls over gRPC."""
HTTP_CODES = tuple(sorted({401, 404, 405, 408, 413, 415, 421, *HTTP_OF_ERROR.values()}))
"""The statuses with which the gateway ends calls over HTTP."""
ERROR_OF_GRPC: dict[grpc.StatusCode, type[CallError]] = {code: kind for kind, code, _ in reversed(STATUSES)}

WORKER_ERRORS: dict[grpc.StatusCode, type[WorkerCallError]] = {
    Code.UNAVAILABLE: errors.WorkerUnreachable,
    Code.FAILED_PRECONDITION: errors.WorkerUnreachable,  # it is of another epoch
    Code.UNAUTHENTICATED: errors.WorkerUnreachable,  # another process got the port of a lost one
    Code.CANCELLED: errors.WorkerUnreachable,
    Code.UNKNOWN: errors.WorkerUnreachable,
    Code.ABORTED: errors.PlacementLost,
    Code.DATA_LOSS: errors.PlacementLost,  # the KV that landed is not the KV that was sent
    Code.NOT_FOUND: errors.AdapterMissing,
    Code.RESOURCE_EXHAUSTED: errors.WorkerFull,
    Code.DEADLINE_EXCEEDED: errors.WorkerTimedOut,
    Code.INTERNAL: errors.ForwardFailed,
    Code.OUT_OF_RANGE: errors.LogitsNotFinite,
    Code.INVALID_ARGUMENT: errors.RequestRefused,
}


def http_status(error: CallError) -> int:
    return HTTP_OF_ERROR.get(type(error), 500)


def grpc_status(error: TandemError) -> grpc.StatusCode:
    """Returns the error's status, or INTERNAL if it has none."""
    return next((code for kind, code, _ in STATUSES if kind is type(error)), Code.INTERNAL)


def reason(kind: type[TandemError]) -> str:
    """Returns the reason code that programs read: the error's name in UPPER_SNAKE_CASE."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


def retry_after_ms(error: Overloaded) -> str:
    """Returns the value of RETRY_AFTER_KEY."""
    return str(math.ceil(1000 * error.retry_after_seconds))


async def refuse(context: grpc.aio.ServicerContext, error: TandemError) -> NoReturn:
    """Ends a call with the error's status."""
    code = grpc_status(error)
    advice = ((RETRY_AFTER_KEY, retry_after_ms(error)),) if isinstance(error, Overloaded) else ()
    number: Any = code.value
    details = details_of(
        number[0],
        str(error),
        reason(type(error)),
        is_invalid=isinstance(error, errors.InvalidRequest),
        retry_seconds=error.retry_after_seconds if isinstance(error, Overloaded) else None,
    )
    await context.abort(code, str(error), trailing_metadata=(*advice, *details))
    raise AssertionError("abort() raises")


def error_of(error: grpc.RpcError) -> type[CallError]:
    """Returns the error that a call to a gateway failed with: by its details, or the first error of its status."""
    code: Any = error.code()  # type: ignore[attr-defined]  # unseen by pyright
    if code is Code.UNKNOWN and (error.details() or "").startswith(REMOVED):  # type: ignore[attr-defined]
        return errors.Unavailable
    said = reason_of(error.trailing_metadata())  # type: ignore[attr-defined]
    named = (kind for kind, status, _ in STATUSES if said and status is code and reason(kind) == said)
    return next(named, ERROR_OF_GRPC.get(code, errors.ServerError))


@contextmanager
def worker_errors(worker: str) -> Iterator[None]:
    """Raises the failure of a call to a worker as a WorkerCallError. worker: its name in the error's text."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        kind = WORKER_ERRORS.get(error.code(), WorkerCallError)
        refused = kind is errors.RequestRefused  # whose text is for the client
        said = error.details() or "" if refused else f"{worker} answered {error.code().name}: {error.details()}"
        raise kind(said) from error
    except grpc.aio.UsageError as error:
        raise errors.WorkerUnreachable(f"the connection to {worker} was closed") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this task: the process is gone, so the connection was closed during the call.
        raise errors.WorkerUnreachable(f"the connection to {worker} was closed") from error
