"""The continuation of a client's request after its connection to the gateway broke."""

import random
import secrets
import time
import uuid

import grpc

from tandem.cluster.client.client_messages import LONGEST_CALL, retry_after_seconds
from tandem.cluster.errors import Overloaded, Unavailable
from tandem.cluster.statuses import error_of
from tandem.proto import inference_pb2

RETRY_SECONDS = 0.2
# The beginnings of gRPC's text for an established connection that broke.
BROKEN = ("Stream removed", "Socket closed", "Connection reset", "recvmsg:", "GOAWAY")


class Resumption:
    """One request and its tokens so far. Owned by the generator that streams it.

    The first call sets request_id and seed, so a restarted gateway continues the stream with the same tokens.
    """

    def __init__(self, request: inference_pb2.GenerateRequest, timeout: float, resume_seconds: float) -> None:
        self.request = request
        self._deadline = time.monotonic() + timeout
        self._resume_seconds = resume_seconds
        self._broken_since: float | None = None
        self._tokens: list[int] = []
        self._reached = False
        self.finished = False  # the last message has come; an error behind it does not count
        request.request_id = request.request_id or uuid.uuid4().hex
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)

    @property
    def seconds_left(self) -> float:
        return min(max(0.0, self._deadline - time.monotonic()), LONGEST_CALL)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._broken_since = None
        self._tokens += message.token_ids
        self.finished = message.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED

    def pause(self, error: grpc.RpcError, answered: bool) -> float | None:
        """Changes the request to resume. Returns the seconds to wait before it is sent again, or None if it failed.

        A full queue does not fail a request that was admitted before: all requests come back at once. UNAVAILABLE comes
        from the connection, or from a cluster that ends and may be started again. Without an answer or a connection
        ever, there is no gateway.
        """
        now = time.monotonic()
        kind = error_of(error)
        crowded = kind is Overloaded and self._broken_since is not None
        self._broken_since = now if self._broken_since is None else self._broken_since
        self._reached |= answered or (error.details() or "").startswith(BROKEN)
        if not crowded and (kind is not Unavailable or not self._reached):
            return None
        pause = retry_after_seconds(error) if crowded else RETRY_SECONDS
        if now - self._broken_since >= self._resume_seconds or self.seconds_left <= pause:
            return None
        self.request.resume.Clear()
        self.request.resume.SetInParent()
        self.request.resume.token_ids.extend(self._tokens)
        return pause * random.uniform(0.5, 1.0)  # or all clients of a gateway would come back at once
