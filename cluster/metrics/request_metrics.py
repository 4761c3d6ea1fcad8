"""Counts what requests do, in one gateway process."""

import asyncio
import time

from tandem.cluster.errors import ForwardFailed
from tandem.cluster.errors.statuses import GRPC_CODES, HTTP_CODES
from tandem.cluster.metrics import series
from tandem.cluster.metrics.cells import Recorder
from tandem.cluster.metrics.series import LAYOUT
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.requests.observer import RequestObserver
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.router import Placement
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.sampling.finish import FinishReason

FLUSH_SECONDS = 0.25
REASONS = {
    FinishReason.STOP: series.STOP,
    FinishReason.LENGTH: series.LENGTH,
    FinishReason.ABORT: series.ABORT,
    FinishReason.ERROR: series.ERROR,
}


class RequestMetrics:
    """Counts requests. Owned by the gateway's event loop. The gaps between tokens gather in a list, which flush()
    counts: that costs less than a histogram's bucket for each gap."""

    def __init__(self, table: GatewayTable) -> None:
        self.table = table
        self.recorder = Recorder(LAYOUT, table.lasting(table.process))
        self.gaps: list[float] = []

    def observe(self, request_id: str, client: str, arrived: float) -> RequestObserver:
        """Begins to watch a request."""
        return _Watched(self, arrived)

    def rejected_grpc(self, code: str) -> None:
        """Counts a call over gRPC that ends with this status."""
        self.recorder.add(series.REJECTED, 1, series.GRPC, code if code in GRPC_CODES else "INTERNAL")

    def rejected_http(self, status: int) -> None:
        """Counts a call over HTTP that ends with this status."""
        self.recorder.add(series.REJECTED, 1, series.HTTP, str(status if status in HTTP_CODES else 500))

    def keys_file_failed(self) -> None:
        """The keys file has changed, and cannot be used."""
        self.recorder.add(series.KEYS_FILE_ERRORS)

    def flush(self) -> None:
        """Counts the tokens whose gaps have gathered."""
        gaps, self.gaps = self.gaps, []
        if gaps:
            self.recorder.observe_all(series.GAPS, gaps)
            self.recorder.add(series.GENERATION_TOKENS, len(gaps))

    async def run(self) -> None:
        """Flushes regularly, until it is cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self.flush()


class _Watched(RequestObserver):
    """Counts one request."""

    __slots__ = ("_arrived", "_last", "_metrics", "_reads", "_request")

    def __init__(self, metrics: RequestMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._last = 0.0  # when a token was sent; 0 before the first
        self._request: ValidRequest | None = None
        self._reads = False  # whether it asks for no tokens

    def validated(self, request: ValidRequest) -> None:
        self._request = request

    def placed(self, placement: Placement, *, moved: bool) -> None:
        recorder = self._metrics.recorder
        recorder.add(series.RESERVATIONS)
        if moved:
            recorder.add(series.MOVES)

    def prefilled(self, result: "worker_pb2.RemoteSendResponse | worker_pb2.Prefilled") -> None:
        recorder = self._metrics.recorder
        recorder.add(series.PREFILL_SECONDS, result.prefill_seconds)
        if isinstance(result, worker_pb2.Prefilled):
            recorder.add(series.LOCAL_PROMPTS)
            return
        recorder.add(series.PUSHES)
        recorder.add(series.PUSH_BYTES, result.bytes_pushed)
        recorder.add(series.PUSH_SECONDS, result.push_seconds)

    def tokens(self, count: int) -> None:
        now = time.perf_counter()
        last, self._last = self._last, now
        if not last:
            self._first_tokens(now, count)
        elif count == 1:
            self._metrics.gaps.append(now - last)
        elif count:
            self._metrics.gaps += [(now - last) / count] * count
        else:
            self._last = last

    def _first_tokens(self, now: float, count: int) -> None:
        recorder = self._metrics.recorder
        recorder.observe(series.FIRST_TOKEN, now - self._arrived)
        recorder.add(series.GENERATION_TOKENS, count)
        request = self._request
        recorder.add(series.PROMPT_TOKENS, len(request.prompt) if request else 0)
        target = request.params.first_token_seconds if request and request.params.num_answers == 1 else None
        if target is not None:
            recorder.add(series.TARGETS, 1, series.MET if now - self._arrived <= target else series.MISSED)
        self._metrics.table.add(Column.DECODING, 1)

    def read(self, usage: inference_pb2.Usage) -> None:
        self._reads = True
        recorder = self._metrics.recorder
        recorder.add(series.PROMPT_TOKENS, usage.prompt_tokens)
        recorder.add(series.PREFIX_QUERIES, usage.prompt_tokens)
        recorder.add(series.PREFIX_HITS, usage.cached_tokens)
        recorder.add(series.HOST_HITS, usage.host_cached_tokens)
        recorder.add(series.DISK_HITS, usage.disk_cached_tokens)

    def lost(self, error: Exception) -> None:
        reason = series.FAILED if isinstance(error, ForwardFailed) else series.LOST
        self._metrics.recorder.add(series.REPLAYS, 1, reason)

    def ended(
        self,
        reason: FinishReason,
        error: BaseException | None,
        usage: inference_pb2.Usage,
        timings: inference_pb2.Timings,
    ) -> None:
        recorder, request = self._metrics.recorder, self._request
        if self._last:
            self._metrics.table.add(Column.DECODING, -1)
        if request is None:
            return
        recorder.add(series.SUCCESS, 1, REASONS[reason])
        recorder.add(series.ANSWERED, 1, series.BY_ADAPTER if request.adapter else series.BY_MODEL)
        if self._last:
            recorder.add(series.PREFIX_QUERIES, usage.prompt_tokens)
            recorder.add(series.PREFIX_HITS, usage.cached_tokens)
            recorder.add(series.HOST_HITS, usage.host_cached_tokens)
            recorder.add(series.DISK_HITS, usage.disk_cached_tokens)
            recorder.add(series.DRAFTED, usage.drafted_tokens)
            recorder.add(series.ACCEPTED, usage.accepted_tokens)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if self._reads:
            recorder.observe(series.TOTAL, timings.total_seconds)
            recorder.observe(series.QUEUE, timings.queue_seconds)
            recorder.observe(series.INFERENCE, timings.total_seconds - timings.queue_seconds)
            recorder.observe(series.PROMPT_LENGTH, usage.prompt_tokens)
            return
        decode = max(0.0, self._last - self._arrived - timings.first_token_seconds)
        recorder.observe(series.TOTAL, timings.total_seconds)
        recorder.observe(series.QUEUE, timings.queue_seconds)
        recorder.observe(series.INFERENCE, timings.total_seconds - timings.queue_seconds)
        recorder.observe(series.PREFILL, timings.first_token_seconds - timings.queue_seconds)
        recorder.observe(series.DECODE, decode)
        recorder.observe(series.PROMPT_LENGTH, usage.prompt_tokens)
        recorder.observe(series.OUTPUT_LENGTH, usage.output_tokens)
        recorder.observe(series.MAX_TOKENS, request.params.max_tokens)
        if usage.output_tokens > 1:
            recorder.observe(series.TOKEN_TIME, decode / (usage.output_tokens - 1))
