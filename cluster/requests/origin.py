"""The origin of a call, for everything that watches its request."""

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.keys.access import OPERATOR, Access

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
MAX_GIVEN = 128  # characters
KEPT = 119  # of these in the request's own id, which takes 128 with what is added
GIVEN = re.compile(rf"[A-Za-z0-9._:~+/=@-]{{1,{MAX_GIVEN}}}")


@dataclass(frozen=True)
class Origin:
    """One call: the frontend that it came through, and what its headers or metadata say."""

    frontend: str = ""  # grpc or http
    request_id: str = ""  # empty: made when the request is validated
    given_id: str = ""  # by which the client knows it; empty where it said none
    traceparent: str = ""  # as W3C's trace context has it; not checked
    access: Access = OPERATOR  # what its caller may do


current_origin: "ContextVar[Origin]" = ContextVar("current_origin", default=Origin())  # noqa: B039  # frozen


def own_id(given: str) -> str:
    """A request's id that begins with what the client gave: two calls may give the same at a time."""
    made = uuid.uuid4().hex
    return f"{given[:KEPT]}-{made[:8]}" if given else made


def check_given_id(values: list[str]) -> str:
    """Returns the header's value, empty without the header. Raises InvalidRequest if it is given twice or is
    invalid."""
    if not values:
        return ""
    if len(values) > 1 or not GIVEN.fullmatch(values[0]):
        shown = f"{values[0]!r:.80}" if len(values) == 1 else f"given {len(values)} times"
        raise InvalidRequest(
            f"{REQUEST_ID_KEY} is {shown}; it must be one value of 1 to {MAX_GIVEN} letters, digits "
            "and . _ : ~ + / = @ -"
        )
    return values[0]
