import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.client.resumption import Resumption
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.errors import (
    CallError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY
from tandem.cluster.protocol import Prompt
from tandem.proto import inference_pb2
from tests.cluster.fake_gateway import FakeGateway, serving

Generate = Callable[..., list[GenerateUpdate]]


def generate_sync(address: str, prompt: Prompt, **options: Any) -> list[GenerateUpdate]:
    with Client(address) as client:
        return list(client.generate(prompt, **options))


def generate_async(address: str, prompt: Prompt, **options: Any) -> list[GenerateUpdate]:
    async def collect() -> list[GenerateUpdate]:
        async with AsyncClient(address) as client:
            return [update async for update in client.generate(prompt, **options)]

    return asyncio.run(collect())


both = pytest.mark.parametrize("generate", [generate_sync, generate_async])


@both
def test_updates_come_as_values(generate: Generate) -> None:
    with serving(FakeGateway()) as address:
        updates = generate(address, "hello")
    assert [update.text for update in updates] == ["one", " two", ""]
    assert [update.token_ids for update in updates] == [(0,), (1,), ()]
    assert [update.finish_reason for update in updates] == [None, None, "stop"]
    first, *_, last = updates
    assert first.usage is None
    assert first.timings is None
    assert last.usage is not None
    assert last.timings is not None
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (3, 2)
    assert (last.timings.bytes_pushed, last.timings.total_seconds) == (7, 0.5)


def test_each_client_has_a_connection_of_its_own() -> None:
    """A gateway of several processes could not share their requests otherwise."""
    gateway = FakeGateway()
    with serving(gateway) as address, Client(address) as one, Client(address) as other:
        for client in (one, one, other):
            list(client.generate("x"))
    assert gateway.peers[0] == gateway.peers[1] != gateway.peers[2]


@both
def test_requests_carry_what_was_asked(generate: Generate) -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        generate(address, "text", request_id="mine", max_tokens=0, temperature=0.0, stop="END", stop_token_ids=[4])
        generate(address, [1, 2, 3], cache_salt="mine alone")
        generate(address, [])
        generate(address, [{"role": "user", "content": "hi"}], ignore_eos=True)
    text, ids, empty, chat = gateway.requests
    assert (text.text, text.request_id) == ("text", "mine")
    assert text.sampling.HasField("max_tokens")
    assert text.sampling.HasField("temperature")
    assert not text.sampling.HasField("top_p")
    assert list(text.sampling.stop) == ["END"]
    assert list(text.sampling.stop_token_ids) == [4]
    assert struct.unpack("<3I", ids.token_bytes) == (1, 2, 3)
    assert (ids.cache_salt, text.cache_salt) == ("mine alone", "")
    assert empty.WhichOneof("input") == "token_bytes"
    assert (chat.chat.messages[0].role, chat.chat.messages[0].content) == ("user", "hi")
    assert chat.sampling.ignore_eos


@both
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
    ],
)
def test_status_codes_are_typed_errors(generate: Generate, code: grpc.StatusCode, kind: type[CallError]) -> None:
    with serving(FakeGateway(words=(), fails=(code, "top_p is 2; at most 1"))) as address:
        with pytest.raises(kind, match="top_p is 2; at most 1") as caught:
            generate(address, "x")
        with Client(address) as client, pytest.raises(kind):
            client.model_info()
    assert type(caught.value) is kind


class FullGateway(FakeGateway):
    """A gateway that refuses the first requests, and advises when to come again."""

    refusals = 2
    advice_ms = 10

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if len(self.requests) < self.refusals:
            self.requests.append(request)
            context.set_trailing_metadata(((RETRY_AFTER_KEY, str(self.advice_ms)),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield from super().Generate(request, context)


@both
def test_what_a_full_gateway_has_not_begun_is_sent_again(generate: Generate) -> None:
    gateway = FullGateway()
    with serving(gateway) as address:
        assert generate(address, "x")[-1].finish_reason == "stop"
    first, *others = gateway.requests
    assert others == [first] * 2  # nothing to resume


class Leaving(FakeGateway):
    """A gateway that ends the first call as a stopping gRPC server ends a call that it has not looked at."""

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if not self.requests:
            self.requests.append(request)
            context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        yield from super().Generate(request, context)


@both
def test_a_call_that_a_leaving_gateway_has_not_looked_at_is_sent_again(generate: Generate) -> None:
    gateway = Leaving()
    with serving(gateway) as address:
        assert generate(address, "x")[-1].finish_reason == "stop"
    assert len(gateway.requests) == 2


class Dying(FakeGateway):
    """A gateway whose first connection breaks after the first token, which some versions of gRPC call UNKNOWN."""

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        answer = super().Generate(request, context)
        if not self.requests:
            yield next(answer)
            context.abort(grpc.StatusCode.UNKNOWN, "Stream removed")
        yield from answer


@both
def test_a_broken_connection_is_unavailable_whatever_grpc_calls_it(generate: Generate) -> None:
    gateway = Dying()
    with serving(gateway) as address:
        assert generate(address, "x")[-1].finish_reason == "stop"
    assert list(gateway.requests[1].resume.token_ids) == [0]
    with (
        serving(Dying()) as address,
        Client(address, resume_seconds=0) as client,
        pytest.raises(Unavailable, match=f"^{address}: no gateway answers there: Stream removed"),
    ):
        list(client.generate("x"))


@both
def test_the_advice_of_a_full_gateway_must_fit_into_the_time_left(generate: Generate) -> None:
    gateway = FullGateway()
    gateway.advice_ms = 20_000
    with serving(gateway) as address, pytest.raises(Overloaded, match="full") as caught:
        generate(address, "x", timeout=10)
    assert caught.value.retry_after_seconds == 20
    assert len(gateway.requests) == 1


def test_pauses_before_a_full_gateway_grow_and_differ() -> None:
    """Never below its advice; the last ones leave time for another try."""
    error = _Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, ((RETRY_AFTER_KEY, "1000"),))
    runs = []
    for _ in range(2):
        resumption = Resumption(inference_pb2.GenerateRequest(), timeout=600, resume_seconds=60)
        runs.append([resumption.pause(error, answered=True) or 0.0 for _ in range(8)])
    assert runs[0] != runs[1]
    for run in runs:
        assert all(least <= pause <= 2 * least for pause, least in zip(run, (1, 2, 4, 8, 10, 10, 10, 10), strict=True))
    late = Resumption(inference_pb2.GenerateRequest(), timeout=4, resume_seconds=60)
    pauses = [late.pause(error, answered=True) for _ in range(8)]
    assert all(pause is not None and 1 <= pause <= 2 for pause in pauses)


class _Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...]) -> None:
        self.code = lambda: code
        self.details = lambda: "full"
        # The stubs' return type is a private class of theirs, which this tuple stands for.
        self.trailing_metadata = lambda: metadata  # pyright: ignore[reportAttributeAccessIssue]


@both
def test_a_request_that_is_too_large_is_not_to_be_repeated(generate: Generate) -> None:
    fails = (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (2400054 vs. 1048576)")
    with (
        serving(FakeGateway(words=(), fails=fails)) as address,
        pytest.raises(InvalidRequest, match=r"gateway\.max_message_mib allows: .*2400054 vs\. 1048576"),
    ):
        generate(address, "x")


@both
def test_the_deadline_is_kept(generate: Generate) -> None:
    """The error names the timeout."""
    message = "Deadline Exceeded.*; the timeout of Generate was 0.2 s$"
    with serving(FakeGateway(hangs=True)) as address, pytest.raises(DeadlineExceeded, match=f"^{address}: .*{message}"):
        generate(address, "x", timeout=0.2)


@both
def test_nobody_there(generate: Generate) -> None:
    with serving(FakeGateway()) as address:
        pass
    with pytest.raises(Unavailable, match=address):
        generate(address, "x", timeout=5)


@both
@pytest.mark.parametrize(
    ("prompt", "sampling", "part"),
    [
        ("x", {"max_token": 3}, "unknown sampling parameter 'max_token'; did you mean max_tokens?"),
        ("x", {"zzz": 3}, "unknown sampling parameter 'zzz'; known: max_tokens"),
        ("x", {"seed": -1}, r"sampling.seed is -1; it must be an integer in \[0, 2\^64\)"),
        ("x", {"max_tokens": "many"}, r"sampling.max_tokens is 'many'; it must be an integer in \[0, 2\^32\)"),
        ("x", {"stop_token_ids": [1, -3]}, r"stop_token_ids is \[1, -3\]; each must be an integer in \[0, 2\^32\)"),
        ("x", {"stop": ["a", "\udce9"]}, "stop is .*; each must be Unicode text"),
        ("x", {"temperature": "hot"}, "sampling.temperature is 'hot'; it must be a number"),
        ("x", {"request_id": "\udce9"}, r"request_id is '\\udce9'; it must be Unicode text"),
        (
            "caf\udce9",
            {},
            r"prompt is 'caf\\udce9': .*; it must be Unicode text, token ids in",
        ),  # a byte of a command line
        ({"role": "user", "content": "x"}, {}, "a list of chat messages"),
        ([1, -2], {}, r"prompt is \[1, -2\]"),
        (
            [1, {"role": "user"}],
            {},
            r"it must be Unicode text, token ids in \[0, 2\^32\), a list of chat messages or a Fork",
        ),
        ([{"rol": "user"}], {}, "rol"),
        (3, {}, "prompt is 3"),
    ],
)
def test_bad_requests_are_refused_before_they_are_sent(
    generate: Generate, prompt: Prompt, sampling: dict[str, Any], part: str
) -> None:
    with pytest.raises(InvalidRequest, match=part):
        generate("127.0.0.1:1", prompt, **sampling)


def test_closing_the_generator_cancels_the_request() -> None:
    gateway = FakeGateway(hangs=True)
    with serving(gateway) as address, Client(address) as client:
        updates = client.generate("x")
        assert next(updates).text == "one"
        updates.close()
        assert gateway.cancelled.wait(5)


def test_closing_the_async_generator_cancels_the_request() -> None:
    gateway = FakeGateway(hangs=True)

    async def cancel(address: str) -> None:
        async with AsyncClient(address) as client:
            updates = client.generate("x")
            assert (await anext(updates)).text == "one"
            await updates.aclose()
            assert await asyncio.to_thread(gateway.cancelled.wait, 5)

    with serving(gateway) as address:
        asyncio.run(cancel(address))


def test_info() -> None:
    async def ask(address: str) -> tuple[str, str]:
        async with AsyncClient(address) as client:
            return (await client.model_info()).name, (await client.cluster_info()).name

    with serving(FakeGateway()) as address:
        with Client(address) as client:
            assert client.model_info().vocab_size == 512
            assert client.cluster_info().islands[0].workers[1].num_pages == 64
        assert asyncio.run(ask(address)) == ("tiny", "c")


@both
def test_a_client_says_who_it_is(generate: Generate) -> None:
    """Each client object has an id of its own, for all its requests."""
    gateway = FakeGateway()
    with serving(gateway) as address:
        generate(address, "one")
        generate(address, "two")
    first, second = gateway.client_ids
    assert first != second


def test_a_client_id_may_be_given() -> None:
    gateway = FakeGateway()
    security = ClientSecurity(token="some-token")  # which is metadata too
    with serving(gateway) as address, Client(address, security, client_id="me") as client:
        for _ in range(2):
            list(client.generate("x"))
    assert gateway.client_ids == ["me", "me"]


@pytest.mark.parametrize("client_id", ["", "a\nb", "é", "x" * 129])
def test_a_client_id_that_cannot_be_sent_is_refused(client_id: str) -> None:
    with pytest.raises(ConfigError, match="client_id"):
        Client("127.0.0.1:1", client_id=client_id)


def test_numbers_that_no_message_holds() -> None:
    with serving(FakeGateway()) as address, Client(address) as client:
        for number in (-1, 1 << 40, 1.5):
            with pytest.raises(
                InvalidRequest, match=r"num_prefill .*; they must be a name and integers in \[0, 2\^32\)"
            ):
                client.scale(num_prefill=number)  # type: ignore[arg-type]


@both
def test_a_client_may_be_ready_to_wait_for_ever(generate: Generate) -> None:
    with serving(FakeGateway()) as address:
        generate(address, "x", timeout=float("inf"))
        with Client(address) as client:
            client.model_info(timeout=float("inf"))
