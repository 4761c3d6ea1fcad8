"""Observers of requests: metrics, logs and traces are told of each transition of a request."""

from collections.abc import Callable, Sequence

from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.router import Placement
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.sampling.finish import FinishReason


class RequestObserver:
    """Watches one request. The methods here do nothing; an observer overrides those that it needs.

        validated → placed → prefilled, tokens … → ended
                      ↑ lost or moved ┘

    The methods run on the gateway's event loop. They do not block and do not raise. A prompt that the decode worker
    computes itself is prefilled with its last tokens.
    """

    def validated(self, request: ValidRequest) -> None:
        """The request may run. A refused request ends without this call."""

    def placed(self, placement: Placement, *, moved: bool) -> None:
        """Workers have room. moved: the request left a decode worker that goes on serving others."""

    def prefilled(self, result: "worker_pb2.RemoteSendResponse | worker_pb2.Prefilled") -> None:
        """All KV of the prompt has reached its decode worker."""

    def tokens(self, count: int) -> None:
        """A message of so many output tokens goes out, perhaps none. Called for each message, so it must cost
        little."""

    def read(self, usage: inference_pb2.Usage) -> None:
        """The prompts of a call that asks for no tokens are computed. It ends next."""

    def decoded(self, result: worker_pb2.Decoded) -> None:
        """The decode worker has ended the request itself."""

    def lost(self, error: Exception) -> None:
        """The placement ended before the request."""

    def ended(
        self,
        reason: FinishReason,
        error: BaseException | None,
        usage: inference_pb2.Usage,
        timings: inference_pb2.Timings,
    ) -> None:
        """Called once, last. reason: STOP or LENGTH after the last token, ABORT if the client left or a later call took
        over, else ERROR. error: what the client gets in place of the last message."""


Observe = Callable[[str, str, float], RequestObserver]
"""Begins to watch a request. It gets the id, empty if the client gave none; the client; and the arrival, by
time.perf_counter()."""

UNOBSERVED = RequestObserver()


class _Observers(RequestObserver):
    """Several observers as one."""

    def __init__(self, parts: Sequence[RequestObserver]) -> None:
        self._parts = parts
        counting = [part.tokens for part in parts if type(part).tokens is not RequestObserver.tokens]
        if len(counting) == 1:
            self.tokens = counting[0]  # called directly, because it is called for each message

    def validated(self, request: ValidRequest) -> None:
        for part in self._parts:
            part.validated(request)

    def placed(self, placement: Placement, *, moved: bool) -> None:
        for part in self._parts:
            part.placed(placement, moved=moved)

    def prefilled(self, result: "worker_pb2.RemoteSendResponse | worker_pb2.Prefilled") -> None:
        for part in self._parts:
            part.prefilled(result)

    def tokens(self, count: int) -> None:
        for part in self._parts:
            part.tokens(count)

    def read(self, usage: inference_pb2.Usage) -> None:
        for part in self._parts:
            part.read(usage)

    def decoded(self, result: worker_pb2.Decoded) -> None:
        for part in self._parts:
            part.decoded(result)

    def lost(self, error: Exception) -> None:
        for part in self._parts:
            part.lost(error)

    def ended(
        self,
        reason: FinishReason,
        error: BaseException | None,
        usage: inference_pb2.Usage,
        timings: inference_pb2.Timings,
    ) -> None:
        for part in self._parts:
            part.ended(reason, error, usage, timings)


def all_of(observers: Sequence[Observe]) -> Observe:
    """Makes one Observe of several, each of which watches each request."""
    if len(observers) == 1:
        return observers[0]

    def observe(request_id: str, client: str, arrived: float) -> RequestObserver:
        return _Observers([one(request_id, client, arrived) for one in observers]) if observers else UNOBSERVED

    return observe
