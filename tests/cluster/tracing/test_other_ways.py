"""Traces of requests that do not go straight to their end: lost, placed again, moved, given up."""

import asyncio
from pathlib import Path

import pytest

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.errors import AttemptsExhausted, CallError
from tandem.cluster.gateway.gateway import Gateway
from tandem.proto import admin_pb2
from tests.cluster.fake_worker import FakeWorker
from tests.cluster.open_gateway import PROMPT, TOKENS, OpenGateway, open_gateway
from tests.cluster.routing import test_adaptive_roles as adaptive
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of

KEEP = {"tracing.keep": 4, "gateway.max_attempts": 3}
PREFILL, DECODE = "prefill worker i/0", "decode worker i/1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("traces"))


def traced(gateway: OpenGateway, name: str) -> admin_pb2.Trace:
    """The trace of a request that is sent now."""
    with Client(gateway.grpc) as client:
        updates = list(client.generate(PROMPT, request_id=name, timeout=60, max_tokens=len(TOKENS)))
        assert tokens_of(updates) == TOKENS
        return client.trace(name).trace


def spans_of(trace: admin_pb2.Trace) -> list[admin_pb2.Span]:
    """But the request's own, whose children they are: in the order of their beginnings."""
    root, *spans = trace.spans
    assert (root.name, root.process, root.attributes["request_id"]) == ("request", "gateway", trace.request_id)
    assert {(span.process, span.parent_id) for span in spans} == {("gateway", root.span_id)}
    assert all(root.begin_ns <= span.begin_ns <= span.end_ns <= root.end_ns for span in spans)
    assert len({span.span_id for span in trace.spans}) == len(trace.spans)
    return sorted(spans, key=lambda span: span.begin_ns)


@pytest.mark.parametrize(
    ("fails", "part"),
    [
        ({"RemoteSend": ["UNAVAILABLE"]}, "prefill worker (PE 0,"),
        ({"StartGenerate": ["go on", "go on", "UNAVAILABLE"]}, "decode worker (PE 1,"),
    ],
)
def test_a_lost_placement_and_the_one_that_follows_are_spans(
    model: Path, fails: dict[str, list[str]], part: str
) -> None:
    with open_gateway(model, KEEP, fails) as gateway:
        trace = traced(gateway, "again")
    spans = spans_of(trace)
    assert [span.name for span in spans] == ["validate", "queue", "place", "loss", "replay"]
    *_, place, loss, replay = spans
    assert part in loss.attributes["error"]
    assert "as the test says" in loss.attributes["error"]
    assert loss.begin_ns == loss.end_ns == replay.begin_ns, "the client waits from the loss on"
    for span in (place, replay):
        assert (span.attributes["prefill"], span.attributes["decode"]) == (PREFILL, DECODE)
        assert span.attributes["pages"] == "1"
    assert trace.spans[0].attributes["status"] == "length"


def test_each_loss_has_its_replay_until_the_request_is_given_up(model: Path) -> None:
    with open_gateway(model, KEEP, {"RemoteSend": ["UNAVAILABLE"] * 3}) as gateway, Client(gateway.grpc) as client:
        with pytest.raises(AttemptsExhausted):
            list(client.generate(PROMPT, request_id="given-up", timeout=60, max_tokens=4))
        trace = client.trace("given-up").trace
    names = [span.name for span in spans_of(trace)]
    assert names == ["validate", "queue", "place", "loss", "replay", "loss", "replay", "loss"]
    assert trace.spans[0].attributes["status"] == "aborted"


def test_a_request_that_is_lost_while_it_waits_again_has_no_replay_yet(model: Path) -> None:
    options = {**KEEP, "gateway.queue_seconds": 0.3}
    fails = {"RemoteSend": ["UNAVAILABLE"], "PrepareReceive": ["go on", *["RESOURCE_EXHAUSTED"] * 100]}
    with open_gateway(model, options, fails) as gateway, Client(gateway.grpc) as client:
        with pytest.raises(CallError):
            list(client.generate(PROMPT, request_id="waits", timeout=60, max_tokens=4))
        names = [span.name for span in spans_of(client.trace("waits").trace)]
    assert names == ["validate", "queue", "place", "loss"]


def test_a_move_is_a_span_with_the_workers_that_go_on(model: Path) -> None:
    """The worker that had the request sends its KV as a prefill worker does."""

    async def body(gateway: Gateway, client: AsyncClient, prefill: FakeWorker, decode: FakeWorker) -> None:
        adaptive.link(gateway, 0).report = adaptive.IDLE
        decode.step_seconds, count = 0.05, 0
        async for _ in client.generate(adaptive.PROMPT, request_id="moves", timeout=60, max_tokens=60, temperature=0):
            count += 1
            if count == 4:
                adaptive.link(gateway, 1).report = adaptive.SLOW
        spans = spans_of(await asyncio.to_thread(trace_of, gateway._addresses.grpc))
        assert [span.name for span in spans] == ["validate", "queue", "place", "move"]
        place, move = spans[2:]
        assert (place.attributes["prefill"], place.attributes["decode"]) == (PREFILL, DECODE)
        assert (move.attributes["prefill"], move.attributes["decode"]) == (DECODE, PREFILL)

    def trace_of(address: str) -> admin_pb2.Trace:
        with Client(address) as client:
            return client.trace("moves").trace

    adaptive.with_gateway(model, body, **{"tracing.keep": 4})
