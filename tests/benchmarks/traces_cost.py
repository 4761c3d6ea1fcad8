"""Measures what traces cost the gateway. Prints JSON.

Two gateways of one process, one with traces and one without, as metrics_cost.py has them with and without metrics; both
count. Every request is traced.

    kept        tracing.keep is 1,024: each request's spans are made and kept
    exported    they also go to a collector by OTLP over HTTP, which takes them and does nothing
    request_us  what the spans of one request take, made and kept by themselves: the least of nine rounds
"""

import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tandem.cluster.config.sections import TracingSection
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.router import Placement
from tandem.cluster.tracing.request_trace import Tracer
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.config import Role
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.benchmarks.frontends import one_gateway, process_of
from tests.benchmarks.metrics_cost import MOST, compare
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result, rounded

KINDS = ("kept", "exported")
KEEP = 1024
MOST_US = 100  # 1 % of what 128 messages take


class _Sink(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_collector(pipe: Connection) -> None:
    """Collects in a process of its own: says where it listens, and runs until it is told to stop."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        pipe.send(f"http://127.0.0.1:{server.server_port}/v1/traces")
        pipe.recv()
        server.shutdown()


def traced(endpoint: str | None) -> Callable[[str, str], GatewaySettings]:
    def settings(folder: str, mode: str) -> GatewaySettings:
        one, section = one_gateway(folder), TracingSection(keep=KEEP, endpoint=endpoint)
        return one if mode == "without" else replace(one, config=one.config.model_copy(update={"tracing": section}))

    return settings


def request_us() -> float:
    """Measures a request that goes straight to its end: what the gateway tells its observer, and nothing else."""
    tracer, now = Tracer(KEEP, 1.0), time.time_ns()
    prefill, decode = (cast("Any", SimpleNamespace(key=("i", pe), role=role)) for pe, role in enumerate(Role))
    request = ValidRequest("request", PromptSpec(np.arange(128)), SamplingParams())
    placement = Placement("0.1.1/request", prefill, decode, worker_pb2.Reservation(pages=8), 128, 256)
    sent = worker_pb2.RemoteSendResponse(began_ns=now, prefill_seconds=0.1, push_seconds=0.01)
    decoded = worker_pb2.Decoded(began_ns=now, ended_ns=now)
    usage, timings = inference_pb2.Usage(prompt_tokens=128), inference_pb2.Timings(first_token_seconds=0.1)

    def one() -> None:
        trace = tracer.observe("request", "client", time.perf_counter())
        trace.validated(request)
        trace.placed(placement, moved=False)
        trace.prefilled(sent)
        trace.decoded(decoded)
        trace.ended(FinishReason.LENGTH, None, usage, timings)

    return min(timeit.repeat(one, number=500, repeat=9)) / 500 * 1e6


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--kinds", default=KINDS, choices=KINDS)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--output", type=int, default=128, help="mean tokens of an output")
    parser.add_argument("--steps", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=6)
    add_seconds(parser)
    given = parser.parse_args()
    found: dict[str, Any] = {"request_us": rounded(request_us())}
    targets = [at_most("spans of one request, µs", found["request_us"], MOST_US)]
    with process_of(serve_collector) as collector:
        endpoint = collector.recv()
        for kind in given.kinds:
            settings = traced(endpoint if kind == "exported" else None)
            sizes = given.clients, given.output, given.steps, given.rounds
            found[kind] = compare(settings, lambda addresses: nullcontext(), *sizes, Budget(given.seconds))
            ratios = found[kind]["ratios"]
            targets += [
                at_most(f"loop time a message, {kind} ÷ without", ratios["loop_us"], 1 + MOST),
                at_least(f"tokens a second, {kind} ÷ without", ratios["tokens_s"], 1 - MOST),
                at_most(f"time a token, {kind} ÷ without", ratios["gap_p50_ms"], 1 + MOST),
            ]
    print_result(
        {"case": f"{given.clients} clients", "steps_a_second": given.steps, **found, "targets": targets}, given
    )


if __name__ == "__main__":
    main()
