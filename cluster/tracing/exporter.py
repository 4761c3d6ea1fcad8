"""Sends traces to an OTLP/HTTP collector. Only this file uses opentelemetry-sdk."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tandem.cache.extras import install
from tandem.cluster.errors import StartFailed
from tandem.proto import admin_pb2

log = logging.getLogger(__name__)
MAX_SPANS = 2048  # that wait; more are dropped
SPANS_A_CALL = 512
CALL_SECONDS = 5


def otlp_exporter(endpoint: str, service: str) -> "tuple[Callable[[admin_pb2.Trace], None], Callable[[], None]]":
    """Returns a function that takes a trace, from any thread and without waiting, and one that ends the exporter.

    endpoint: such as http://127.0.0.1:4318/v1/traces. StartFailed without the extra `tracing`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.trace import SpanContext, TraceFlags
    except ImportError:
        raise StartFailed(f"tracing.endpoint is set; it needs opentelemetry: {install('tracing')}") from None

    class Exporter(OTLPSpanExporter):
        """An exporter that logs once when a collector fails."""

        said = False

        def export(self, spans: Sequence[Any]) -> Any:
            result = super().export(spans)
            if result is not SpanExportResult.SUCCESS and not self.said:
                self.said = True
                log.warning("tracing.endpoint does not accept spans; they are dropped, without further warnings")
            return result

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it says so each time
    exporter = Exporter(endpoint=endpoint, timeout=CALL_SECONDS)
    batches = BatchSpanProcessor(exporter, max_queue_size=MAX_SPANS, max_export_batch_size=SPANS_A_CALL)
    resources: dict[str, Any] = {}

    def export(trace: admin_pb2.Trace) -> None:
        def context(span_id: str) -> Any:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int(trace.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

        for span in trace.spans:
            if span.process not in resources:
                names = {"service.name": service, "service.instance.id": span.process}
                resources[span.process] = Resource(names)
            batches.on_end(
                ReadableSpan(
                    name=span.name,
                    context=context(span.span_id),
                    parent=context(span.parent_id) if span.parent_id else None,
                    resource=resources[span.process],
                    attributes=dict(span.attributes),
                    start_time=span.begin_ns,
                    end_time=span.end_ns,
                )
            )

    def end() -> None:
        """A collector that accepts and does not answer must not hold up the gateway's end."""
        last = threading.Thread(target=batches.shutdown, name="traces", daemon=True)
        last.start()
        last.join(CALL_SECONDS)

    return export, end
