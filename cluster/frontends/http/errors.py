"""How an error is said over HTTP: a status, and a body in the form of OpenAI's API."""

import math
from collections.abc import Mapping
from typing import Any

from tandem.cluster.client.client_messages import RETRY_AFTER_KEY
from tandem.cluster.errors import (
    AttemptsExhausted,
    CallError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Superseded,
    Unauthenticated,
    Unavailable,
)

STATUS_OF_ERROR: Mapping[type[CallError], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    Overloaded: 429,
    AttemptsExhausted: 503,
    Superseded: 503,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class HttpError(Exception):
    """An answer other than 200. param: the body's field that is to blame."""

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

    @classmethod
    def of(cls, error: CallError) -> "HttpError":
        """What a failed call comes to; 500 for what is nobody's fault but the server's."""
        headers: dict[str, str] = {}
        if isinstance(error, Overloaded):
            seconds = error.retry_after_seconds
            headers = {"retry-after": str(math.ceil(seconds)), RETRY_AFTER_KEY: str(math.ceil(1000 * seconds))}
        elif isinstance(error, Unauthenticated):
            headers = {"www-authenticate": "Bearer"}
        return cls(STATUS_OF_ERROR.get(type(error), 500), str(error), headers=headers)

    @classmethod
    def other_model(cls, asked: str, served: str) -> "HttpError":
        return cls(404, f"model is {asked!r:.80}; {served!r} is served here", param="model", code="model_not_found")

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
