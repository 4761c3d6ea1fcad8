"""Errors over HTTP: a status, and a body in the form of OpenAI's API."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem.cluster.errors import CallError, Overloaded, Unauthenticated, UnknownModel
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY, http_status, retry_after_ms

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


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
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), param=self.param, code=self.code, headers=self.headers), (self.status, str(self))

    @classmethod
    def of(cls, error: CallError) -> "HttpError":
        """The answer to a failed call."""
        headers: dict[str, str] = {}
        if isinstance(error, UnknownModel):
            return cls(http_status(error), str(error), param="model", code="model_not_found")
        if isinstance(error, Overloaded):
            seconds = error.retry_after_seconds
            headers = {"retry-after": str(math.ceil(seconds)), RETRY_AFTER_KEY: retry_after_ms(error)}
        elif isinstance(error, Unauthenticated):
            headers = {"www-authenticate": "Bearer"}
        return cls(http_status(error), str(error), headers=headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
