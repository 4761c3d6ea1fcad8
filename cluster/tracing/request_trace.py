"""Makes the spans of a request from its observer's calls. Workers report their own times."""

import random
import re
import time
from collections import deque
from collections.abc import Callable

from tandem.cluster.requests.observer import RequestObserver
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.router import Placement
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.cluster.tracing.access_log import status_of
from tandem.proto import admin_pb2, inference_pb2, worker_pb2
from tandem.workers.sampling.finish import FinishReason

GATEWAY = "gateway"
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
MAX_ERROR = 160  # characters

End = Callable[[admin_pb2.Trace], None]


class Tracer:
    """Keeps traces. observe() is an Observe. The latest `keep` traces stay in this process; sampled ones also go to
    `export`."""

    def __init__(self, keep: int, sample_ratio: float, export: End | None = None) -> None:
        self._kept: deque[admin_pb2.Trace] = deque(maxlen=keep)
        self._sample_ratio = sample_ratio
        self._export = export

    def observe(self, request_id: str, client: str, arrived: float) -> RequestObserver:
        return RequestTrace(request_id, arrived, self._sample_ratio, self._finish)

    def find(self, request_id: str) -> admin_pb2.Trace | None:
        """Returns the latest trace with that request id, or with that id of the client."""
        return next((trace for trace in reversed(self._kept) if request_id in (trace.request_id, trace.given_id)), None)

    def _finish(self, trace: admin_pb2.Trace) -> None:
        self._kept.append(trace)
        if self._export is not None and trace.sampled:
            self._export(trace)


class RequestTrace(RequestObserver):
    """The spans of one request. All are children of the request's own span, except pushes, which are parts of
    prefills."""

    def __init__(self, request_id: str, arrived: float, sample_ratio: float, end: End) -> None:
        origin = current_origin.get()
        self._wall = time.time_ns() - int(time.perf_counter() * 1e9)
        given = TRACEPARENT.fullmatch(origin.traceparent)
        self._trace = admin_pb2.Trace(
            request_id=request_id,
            given_id=origin.given_id,
            trace_id=given[1] if given else f"{random.getrandbits(128) or 1:032x}",
            sampled=bool(int(given[3], 16) & 1) if given else random.random() < sample_ratio,
        )
        self._root = self._add("request", GATEWAY, self._at(arrived), 0, given[2] if given else "")
        self._root.attributes["frontend"] = origin.frontend
        self._waits_since = self._root.begin_ns
        self._again = ""  # the next placement's name: "replay" after a loss
        self._placement: Placement | None = None
        self._pushed_ns = 0
        self._decoded = worker_pb2.Decoded()
        self._end = end

    def validated(self, request: ValidRequest) -> None:
        self._trace.request_id = request.request_id
        self._waits_since = time.time_ns()
        self._add("validate", GATEWAY, self._root.begin_ns, self._waits_since)

    def placed(self, placement: Placement, *, moved: bool) -> None:
        asked, now = self._at(placement.asked), time.time_ns()
        if self._placement is None:
            self._add("queue", GATEWAY, self._waits_since, asked)
        name = self._again or ("move" if moved else "place")
        span = self._add(name, GATEWAY, self._waits_since if self._again else asked, now)
        span.attributes["prefill"], span.attributes["decode"] = _name(placement.prefill), _name(placement.decode)
        span.attributes["pages"] = str(placement.reservation.pages)
        self._placement, self._again = placement, ""

    def prefilled(self, result: "worker_pb2.RemoteSendResponse | worker_pb2.Prefilled") -> None:
        if self._placement is None or not result.began_ns:
            return
        worker = _name(self._placement.prefill)
        begin, end = result.began_ns, result.began_ns + int(result.prefill_seconds * 1e9)
        span = self._add("prefill", worker, begin, end)
        span.attributes["prompt_tokens"] = str(self._placement.prompt_tokens)
        span.attributes["cached_tokens"] = str(result.cached_tokens)
        if isinstance(result, worker_pb2.RemoteSendResponse):
            self._pushed_ns = max(begin, end - int(result.push_seconds * 1e9))
            push = self._add("push", worker, self._pushed_ns, end, span.span_id)
            push.attributes["bytes"] = str(result.bytes_pushed)

    def decoded(self, result: worker_pb2.Decoded) -> None:
        self._decoded = result

    def _add_decode(self, result: worker_pb2.Decoded) -> None:
        """handoff: from where the push holds up the prefill until the decode worker has all KV."""
        if self._placement is None or not result.began_ns:
            return
        worker = _name(self._placement.decode)
        if self._pushed_ns and not self._placement.is_local:
            self._add("handoff", worker, min(self._pushed_ns, result.began_ns), result.began_ns)
        self._add("decode", worker, result.began_ns, result.ended_ns)

    def lost(self, error: Exception) -> None:
        self._again, self._waits_since = "replay", time.time_ns()
        span = self._add("loss", GATEWAY, self._waits_since, self._waits_since)
        span.attributes["error"] = str(error)[:MAX_ERROR]

    def ended(
        self,
        reason: FinishReason,
        error: BaseException | None,
        usage: inference_pb2.Usage,
        timings: inference_pb2.Timings,
    ) -> None:
        self._add_decode(self._decoded)
        self._root.end_ns = time.time_ns()
        attributes = self._root.attributes
        attributes["request_id"], attributes["status"] = self._trace.request_id, status_of(reason, error)
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            attributes[name] = str(getattr(usage, name))
        attributes["first_token_seconds"] = f"{timings.first_token_seconds:.6f}"
        self._end(self._trace)

    def _at(self, perf_seconds: float) -> int:
        return self._wall + int(perf_seconds * 1e9)

    def _add(self, name: str, process: str, begin: int, end: int, parent: str | None = None) -> admin_pb2.Span:
        parent = self._root.span_id if parent is None else parent
        made = f"{random.getrandbits(64) or 1:016x}"
        span = self._trace.spans.add(name=name, process=process, span_id=made, parent_id=parent)
        span.begin_ns, span.end_ns = begin, max(begin, end)
        return span


def _name(link: WorkerLink) -> str:
    island, pe = link.key
    return f"{link.role} worker {island}/{pe}"
