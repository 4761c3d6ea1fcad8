"""The details of an error for programs that call over gRPC: google.rpc.Status in grpc-status-details-bin, as the richer
error model defines it. Clients that do not know it read code and text as before."""

import re
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from tandem.proto import admin_pb2, inference_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "tandem"
MAX_DETAILS_BYTES = 2048  # clients take 8 KiB of trailing metadata, which also has the escaped text
MAX_DESCRIPTION = 256  # characters
REQUESTS = (
    inference_pb2.GenerateRequest.DESCRIPTOR,
    inference_pb2.EmbedRequest.DESCRIPTOR,
    admin_pb2.ScaleRequest.DESCRIPTOR,
)
PATH = re.compile(r"[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*")


def details_of(
    code: int, message: str, reason: str, *, is_invalid: bool = False, retry_seconds: float | None = None
) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata; none where they would be too long for clients.

    code, message: as gRPC carries them. reason: what happened, in UPPER_SNAKE_CASE. is_invalid: the message begins with
    the field that is wrong. retry_seconds: after which the same call may succeed.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)]
    field = field_of(message) if is_invalid else ""
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message[:MAX_DESCRIPTION])
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(1e9 * retry_seconds))
        details.append(retry)
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    packed = status.SerializeToString()
    return ((DETAILS_KEY, packed),) if len(packed) <= MAX_DETAILS_BYTES else ()


def reason_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the reason that details_of() was given; empty if there is none."""
    packed = next((value for key, value in metadata or () if key == DETAILS_KEY), b"")
    status, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
    try:
        status.ParseFromString(packed if isinstance(packed, bytes) else packed.encode())
        return info.reason if any(one.Unpack(info) and info.domain == DOMAIN for one in status.details) else ""
    except DecodeError:
        return ""


def field_of(message: str) -> str:
    """Returns the path of the request's field that an error's text begins with; empty if it begins with none."""
    if message.startswith("the prompt has "):
        return "input"
    found = PATH.match(message)
    steps = found[0].split(".") if found else []
    while steps and not any(_has(request, steps) for request in REQUESTS):
        steps.pop()
    return ".".join(steps)


def _has(kind: Any, steps: list[str]) -> bool:
    """Returns whether messages of this descriptor have this path. The oneof of several fields counts as one."""
    name, *rest = (step.partition("[")[0] for step in steps)
    field = kind.fields_by_name.get(name)
    if field is None:
        return name in kind.oneofs_by_name and not rest
    return not rest or (field.message_type is not None and _has(field.message_type, rest))
