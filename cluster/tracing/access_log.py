"""One line for each finished request. It has no prompt, no output and no credential."""

import asyncio
import logging
import time

from tandem.cluster.errors import CallError
from tandem.cluster.errors.statuses import grpc_status
from tandem.cluster.requests.observer import RequestObserver
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.validation import ValidRequest
from tandem.proto import inference_pb2
from tandem.workers.logs import with_fields
from tandem.workers.sampling.finish import FinishReason

log = logging.getLogger(__name__)


class AccessLog:
    """Logs a line for each request. observe() is an Observe."""

    def __init__(self, model: str) -> None:
        self._model = model

    def observe(self, request_id: str, client: str, arrived: float) -> RequestObserver:
        return _AccessLine(self._model, request_id, client, arrived)


class _AccessLine(RequestObserver):
    def __init__(self, model: str, request_id: str, client: str, arrived: float) -> None:
        self._model = model
        self._arrived = arrived
        self._request_id = request_id
        self._client = client
        self._origin = current_origin.get()

    def validated(self, request: ValidRequest) -> None:
        self._request_id = request.request_id
        self._model = request.adapter or self._model

    def ended(
        self,
        reason: FinishReason,
        error: BaseException | None,
        usage: inference_pb2.Usage,
        timings: inference_pb2.Timings,
    ) -> None:
        fields = with_fields(
            request_id=self._request_id,
            frontend=self._origin.frontend,
            client=self._client,
            key=self._origin.access.name,
            model=self._model,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            queue_seconds=round(timings.queue_seconds, 6),
            first_token_seconds=round(timings.first_token_seconds, 6),
            total_seconds=round(time.perf_counter() - self._arrived, 6),
            status=status_of(reason, error),
        )
        log.info("request", extra=fields)


def status_of(reason: FinishReason, error: BaseException | None) -> str:
    """Returns the finish reason; for a request without one, the gRPC status of its error."""
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return reason.name.lower()
    if isinstance(error, asyncio.CancelledError):
        return "abort"
    return grpc_status(error).name.lower() if isinstance(error, CallError) else reason.name.lower()
