"""Streams that break and go on: the resume field, as any client may use it, and the client library."""

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.errors import AttemptsExhausted, Unavailable
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.fake_gateway import FakeGateway, serving
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.island import Island, running_island
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY, steady_here

SAMPLING: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=2)
    return folder


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, {"model.max_model_len": 512}) as island:
        yield island


@pytest.fixture
def stub(island: Island) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(island.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


class BreakingProxy:
    """A port before a gateway's. The first connection is reset in the middle of a call, and then for a while there is
    nobody to connect to; later ones are passed on."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "BreakingProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join(30)

    def _serve(self) -> None:
        first, _ = self._listener.accept()
        behind = self._connect()
        received = b""
        while b"Generate" not in received:  # the call's path, in the first headers of a connection
            readable, _, _ = select.select([first, behind], [], [])
            for end, other in ((first, behind), (behind, first)):
                if end in readable:
                    data = end.recv(1 << 16)
                    received += data
                    if b"Generate" not in received:
                        other.sendall(data)
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        first.close()
        behind.close()
        self._listener.close()
        time.sleep(0.5)
        host, _, port = self.address.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                other = self._connect()
                self._open += [end, other]
                for source, target in ((end, other), (other, end)):
                    threading.Thread(target=_copy, args=(source, target), daemon=True).start()

    def _connect(self) -> socket.socket:
        host, _, port = self._behind.rpartition(":")
        return socket.create_connection((host, int(port)))


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


def request(prompt: list[int], received: list[int] | None, **sampling: Any) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(
        request_id="mine",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.SamplingParams(**SAMPLING | sampling),
    )
    if received is not None:
        message.resume.CopyFrom(inference_pb2.Resume(token_ids=received))
    return message


@pytest.mark.parametrize("received", [0, 1, 2, 15, 29])
def test_the_stream_goes_on_where_it_broke(
    island: Island, stub: inference_pb2_grpc.InferenceStub, received: int
) -> None:
    prompt = random_prompt(20, 1, 500)
    whole = complete(island.address, prompt, **SAMPLING)
    tokens, logprobs = tokens_of(whole), [entry.logprob for update in whole for entry in update.logprobs]
    rest = list(stub.Generate(request(prompt, tokens[:received]), timeout=30))
    assert [token for message in rest for token in message.token_ids] == tokens[received:]
    values = [entry.chosen.logprob for message in rest for entry in message.logprobs]
    assert values == pytest.approx(logprobs[received:], abs=1e-4)
    assert (rest[-1].usage.prompt_tokens, rest[-1].usage.output_tokens) == (20, 30)
    assert rest[-1].usage.cached_tokens <= 20


def test_text_and_stop_strings_go_on_across_the_break(island: Island, stub: inference_pb2_grpc.InferenceStub) -> None:
    """The stream may break anywhere, also in the middle of a stop string or of a character."""
    prompt = random_prompt(20, 2, 500)
    whole = text_of(complete(island.address, prompt, **SAMPLING))
    stop = whole[len(whole) // 2 :][:3]
    parts = complete(island.address, prompt, stop=[stop], **SAMPLING)
    assert parts[-1].finish_reason == "stop"
    tokens = tokens_of(parts)
    for received in range(0, len(tokens), 3):
        first, count = "", 0
        for part in complete(island.address, prompt, **SAMPLING | {"stop": [stop], "max_tokens": 30}):
            if count + len(part.token_ids) > received:
                break
            first, count = first + part.text, count + len(part.token_ids)
        rest = list(stub.Generate(request(prompt, tokens[:count], stop=[stop]), timeout=30))
        assert first + "".join(message.text for message in rest) == text_of(parts)
        assert [token for message in rest for token in message.token_ids] == tokens[count:]
        assert rest[-1].finish_reason == inference_pb2.FINISH_REASON_STOP


@steady_here(STEADY)
def test_a_resumed_request_takes_over_from_the_call_that_runs(
    island: Island, stub: inference_pb2_grpc.InferenceStub
) -> None:
    prompt = random_prompt(20, 3, 500)
    long = {"max_tokens": 400, "logprobs": None}
    whole = tokens_of(complete(island.address, prompt, **SAMPLING | long))
    first = stub.Generate(request(prompt, None, **long), timeout=30)
    received = [token for _ in range(3) for token in next(first).token_ids]
    second = list(stub.Generate(request(prompt, received, **long), timeout=30))
    assert received + [token for message in second for token in message.token_ids] == whole
    with pytest.raises(grpc.RpcError, match="taken request_id 'mine' over") as caught:
        list(first)
    assert caught.value.code() == grpc.StatusCode.ABORTED  # type: ignore[attr-defined]
    running = stub.Generate(request(prompt, None, **long), timeout=30)
    next(running)
    with pytest.raises(grpc.RpcError, match="still runs"):
        list(stub.Generate(request(prompt, None, **long), timeout=30))
    running.cancel()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"request_id": ""}, "request_id is empty; resume needs"),
        ({"resume": [1, 512]}, r"resume.token_ids\[1\] is 512"),
        ({"resume": [7] * 30}, r"resume.token_ids\[29\] is 7, which ends the request \(length\)"),
        ({"resume": [7, 9, 7], "stop_token_ids": [9]}, r"resume.token_ids\[1\] is 9, which ends the request \(stop\)"),
    ],
)
def test_what_cannot_be_resumed(stub: inference_pb2_grpc.InferenceStub, change: dict[str, Any], named: str) -> None:
    message = request([1, 2, 3], change.get("resume", [7]), stop_token_ids=change.get("stop_token_ids", []))
    message.request_id = change.get("request_id", "mine")
    with pytest.raises(grpc.RpcError, match=named) as caught:
        list(stub.Generate(message, timeout=30))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_the_client_asks_for_what_it_lacks() -> None:
    """The gateway breaks off twice. Each time the client sends the tokens that it has, and asks again."""
    gateway = FakeGateway(fails=(grpc.StatusCode.UNAVAILABLE, "gone"))

    def recover() -> None:
        while len(gateway.requests) < 3:
            time.sleep(0.001)
        gateway.fails = None

    with serving(gateway) as address, Client(address) as client:
        threading.Thread(target=recover, daemon=True).start()
        updates = list(client.generate("x"))
    assert updates[-1].finish_reason == "stop"
    first, second, third, *_ = gateway.requests
    assert not first.HasField("resume")
    assert list(second.resume.token_ids) == [0, 1]
    assert list(third.resume.token_ids) == [0, 1, 0, 1]
    for field in ("request_id", "sampling", "text"):
        assert getattr(first, field) == getattr(second, field) == getattr(third, field)
    assert first.request_id
    assert first.sampling.HasField("seed")


class ScoringGateway(FakeGateway):
    """A gateway that breaks off the first call after two of three entries, the second after all, and the third after a
    token."""

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        count = len(self.requests)
        entries = [inference_pb2.TokenLogprobs()]
        entries += [
            inference_pb2.TokenLogprobs(chosen=inference_pb2.TokenLogprob(token_id=token, logprob=-1))
            for token in (1, 2)
        ]
        if not request.resume.token_ids:
            for part in (entries[:2], entries[2:])[: 2 if count > 1 else 1]:
                yield inference_pb2.GenerateResponse(prompt_logprobs=part)
        if count > 2:
            yield inference_pb2.GenerateResponse(token_ids=[count])
        if count < 4:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield inference_pb2.GenerateResponse(finish_reason=inference_pb2.FINISH_REASON_LENGTH)


def test_log_probabilities_of_a_prompt_that_come_again_are_dropped() -> None:
    with serving(ScoringGateway()) as address, Client(address) as client:
        updates = list(client.generate([0, 1, 2], prompt_logprobs=0))
    entries = [entry for update in updates for entry in update.prompt_logprobs]
    assert [entry and entry.token_id for entry in entries] == [None, 1, 2]
    assert tokens_of(updates) == [3, 4]


class CrowdedGateway(FakeGateway):
    """A gateway that breaks off the first call, and has no room for the next ones."""

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        if len(self.requests) in (1, 2):
            self.requests.append(request)
            context.set_trailing_metadata(((RETRY_AFTER_KEY, "20"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "1 calls are under way")
        self.fails = None if self.requests else (grpc.StatusCode.UNAVAILABLE, "gone")
        yield from super().Generate(request, context)


def test_a_stream_that_broke_waits_for_room() -> None:
    """All clients of a gateway that was started again come back at once."""
    gateway = CrowdedGateway()
    with serving(gateway) as address, Client(address) as client:
        assert tokens_of(list(client.generate("x"))) == [0, 1, 0, 1]
        assert [len(request.resume.token_ids) for request in gateway.requests] == [0, 2, 2, 2]


def test_the_client_gives_up_in_time() -> None:
    gateway = FakeGateway(fails=(grpc.StatusCode.UNAVAILABLE, "gone"), words=())
    with serving(gateway) as address, Client(address, resume_seconds=0.5) as client:
        gateway.fails = None
        client.model_info()
        gateway.fails = (grpc.StatusCode.UNAVAILABLE, "gone")
        with pytest.raises(Unavailable, match="gone"):
            list(client.generate("x"))
    assert len(gateway.requests) > 1


async def _collect(address: str) -> list[int]:
    async with AsyncClient(address) as client:
        return [token async for update in client.generate("x") for token in update.token_ids]


def test_a_first_call_goes_on_though_its_gateway_goes_before_it_answers() -> None:
    """The client has a connection, and nothing else yet; the next is refused, as while a gateway is started again."""
    gateway = FakeGateway()
    with serving(gateway) as address, BreakingProxy(address) as proxy, Client(proxy.address) as client:
        assert tokens_of(list(client.generate("x"))) == [0, 1]
    (request,) = gateway.requests
    assert request.HasField("resume")
    assert not request.resume.token_ids


def test_who_never_had_a_connection_is_told_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with Client(address) as client, pytest.raises(Unavailable, match="refused"):
        list(client.generate("x"))


def test_what_the_gateway_gave_up_is_not_asked_again() -> None:
    gateway = FakeGateway(fails=(grpc.StatusCode.ABORTED, "5 attempts"))
    with serving(gateway) as address, Client(address) as client, pytest.raises(AttemptsExhausted, match="5 attempts"):
        list(client.generate("x"))
    assert len(gateway.requests) == 1
