"""Errors over HTTP: a status, and a body in the form of OpenAI's API."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tandem.cluster.errors import CallError, Overloaded, RateLimited, Unauthenticated, UnknownModel
from tandem.cluster.errors.limit_state import LimitState
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY, http_status, retry_after_ms

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
MODEL_NOT_FOUND = "model_not_found"
"""The code of an error about a model that is not served, or not to the caller."""
RATE_LIMITED = "rate_limit_exceeded"
"""The code of an error by which a limit of the caller's key refuses a call."""


class HttpError(Exception):
    """An answer other than 200. param: the body's wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        limits: Sequence[LimitState] = (),
    ) -> None:
        """limits: of the caller's key, for headers in the words of each API."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.limits = tuple(limits)

    def __reduce__(self) -> tuple[object, ...]:
        rest = {"param": self.param, "code": self.code, "headers": self.headers, "limits": self.limits}
        return partial(type(self), **rest), (self.status, str(self))

    @classmethod
    def of(cls, error: CallError) -> "HttpError":
        """Returns the answer to a failed call."""
        headers: dict[str, str] = {}
        code, limits = None, ()
        if isinstance(error, UnknownModel):
            return cls(http_status(error), str(error), param="model", code=MODEL_NOT_FOUND)
        if isinstance(error, Overloaded):
            seconds = error.retry_after_seconds
            headers = {"retry-after": str(math.ceil(seconds)), RETRY_AFTER_KEY: retry_after_ms(error)}
            if isinstance(error, RateLimited):
                code, limits = RATE_LIMITED, error.states
        elif isinstance(error, Unauthenticated):
            headers = {"www-authenticate": "Bearer"}
        return cls(http_status(error), str(error), code=code, headers=headers, limits=limits)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
