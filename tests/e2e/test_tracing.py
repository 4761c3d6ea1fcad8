"""One request, seen by a collector and by `tandem trace`: spans of gateway, prefill worker and decode worker."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tandem.cluster.cli.trace import chrome_trace
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.support.http_client import COMPLETIONS, GREEDY, post
from tests.support.island import running_island
from tests.support.waiting import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = [*range(5, 205)]
PREFILL, DECODE = "prefill worker local/0", "decode worker local/1"


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[str, Any]]] = {}  # by trace: process and span
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in request.resource_spans:
            names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    spans = self.server.spans.setdefault(span.trace_id.hex(), [])
                    spans.append((names["service.instance.id"], span))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector
        collector.shutdown()


def generate(address: str, request_id: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    sampling = inference_pb2.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        request_id=request_id, token_ids=inference_pb2.TokenIds(ids=PROMPT), sampling=sampling
    )
    with grpc.insecure_channel(address) as channel:
        assert list(inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata, timeout=60))


def test_one_request_is_one_trace(small_model: Path, collector: Collector) -> None:
    options = {"tracing.keep": 8, "tracing.endpoint": collector.endpoint, "gateway.http_port": 0}
    parent = f"00-{TRACE}-{PARENT}-01"
    unsampled = f"00-{'1' * 32}-{PARENT}-00"
    with running_island(small_model, options) as island:
        body = {"prompt": PROMPT, "max_tokens": 6, **GREEDY}
        headers = {"traceparent": parent, "x-request-id": "over-http"}
        assert post(island.http, COMPLETIONS, body, headers=headers).status_code == 200
        generate(island.address, "over-grpc", (("traceparent", parent.replace(TRACE, TRACE[::-1])),))
        generate(island.address, "unsampled", (("traceparent", unsampled),))
        with island.client() as client:
            kept = [client.trace(name).trace for name in ("over-http", "over-grpc", "unsampled")]
            assert not client.trace("unknown").HasField("trace")
    assert sorted(collector.spans) == sorted([TRACE, TRACE[::-1]])
    for spans in collector.spans.values():
        check_spans(spans)
    for trace in kept:
        check_rows(json.loads(chrome_trace(trace)))


def check_spans(spans: list[tuple[str, Any]]) -> None:
    of = {span.name: (process, span) for process, span in spans}
    assert len(of) == len(spans)
    assert {name: process for name, (process, _) in of.items()} == {
        **dict.fromkeys(("request", "validate", "queue", "place"), "gateway"),
        **dict.fromkeys(("prefill", "push"), PREFILL),
        **dict.fromkeys(("handoff", "decode"), DECODE),
    }
    root = of["request"][1]
    assert root.parent_span_id.hex() == PARENT
    for name, (_, span) in of.items():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        if name != "request":
            parent = of["prefill" if name == "push" else "request"][1]
            assert span.parent_span_id == parent.span_id


def check_rows(chrome: Any) -> None:
    rows = {event["args"]["name"]: event["pid"] for event in chrome["traceEvents"] if event["name"] == "process_name"}
    assert [*rows] == ["gateway", PREFILL, DECODE]
    begins = {event["name"]: event["ts"] for event in chrome["traceEvents"] if event["ph"] == "X"}
    order = ["request", "validate", "queue", "place", "prefill", "decode"]
    assert sorted(order, key=lambda name: begins[name]) == [*order[:-2], *order[-2:]]


def test_a_collector_that_is_down_costs_no_request(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"tracing.endpoint": "http://127.0.0.1:1/v1/traces"}
    with running_island(small_model, options) as island:
        for number in range(3):
            generate(island.address, f"request {number}")
    until(lambda: "does not accept spans" in caplog.text)
    assert caplog.text.count("does not accept spans") == 1
