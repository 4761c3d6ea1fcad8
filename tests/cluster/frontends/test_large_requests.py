"""Large requests: which are served, which are refused and how, and that all of it goes where streams do not wait."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from tandem.cluster.requests import validation
from tandem.cluster.requests.reading import readers
from tandem.proto import inference_pb2
from tests.benchmarks.attack_kinds import field
from tests.cluster.frontends.test_silent_clients import connected, status, unsaid
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import CHATS, COMPLETIONS, answer, post, refused
from tests.support.waiting import until

GENERATE = "/tandem.v1.Inference/Generate"
LIMITED = {"gateway.max_message_mib": 1, "gateway.max_bodies_mib": 2}
MIB = 1 << 20
PANICS = "x" * 30_000  # of the pre-tokenizer below, after a second


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a checkpoint whose pre-tokenizer backtracks without end over a row of x."""
    folder = save_checkpoint("llama", tmp_path_factory.mktemp("large"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:94]  # of ASCII, as many as the vocabulary has room for
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    slow = pre_tokenizers.Split(Regex("(x+x+)+y|."), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [slow, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_tokens(["z" * 200])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model) as opened:
        yield opened


def told(opened: OpenGateway, data: bytes) -> tuple[grpc.StatusCode, str]:
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(opened.grpc, options=options) as channel:
        return status(channel.unary_stream(GENERATE)(data, timeout=60))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (field(4, b"\x0a\x00" * MIB), "the message and its parts have more than 65536 fields"),
        (field(4, b"\x0a\x00" * 20_000), "chat has 20000 messages; it may have at most 16384"),
        (field(3, field(1, b"\1" * 2 * MIB)), "token_ids.ids has more than 1048576 numbers, the most that are allowed"),
        (field(3, field(1, b"\1" * 70_000)), "the prompt has 70000 tokens; "),
        (field(7, bytes(3 * MIB)), "the prompt has 786432 tokens; "),
        (
            field(7, bytes(4)) + field(6, field(1, b"\1" * 1000)),
            "resume.token_ids has 1000 ids; it may have at most 255",
        ),
        (field(7, bytes(4)) + field(5, field(8, b"") * 200), "sampling.stop has 200 "),
    ],
    ids=["parts", "messages", "numbers", "ids", "bytes", "resumed ids", "stop strings"],
)
def test_counts_are_bounded(opened: OpenGateway, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str) -> None:
    """Before anything is made of what is counted."""

    def not_made(*_: Any) -> None:
        raise AssertionError("token ids were made")

    monkeypatch.setattr(validation, "prompt_tokens", not_made)
    monkeypatch.setattr(validation, "prompt_from_bytes", not_made)
    code, details = told(opened, data)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(reason)


def test_a_message_is_no_larger_than_a_small_model_needs(opened: OpenGateway) -> None:
    code, details = told(opened, field(7, bytes(4 * MIB)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "Received message larger than max" in details


def test_a_large_body_is_read_in_another_process(opened: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered and refused as a small one is."""
    small: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
    large = {**small, "metadata": {"padding": "p" * 200_000}}

    def not_here(*_: Any) -> None:
        raise AssertionError("a large body was read in the gateway")

    expected = answer(opened.http, COMPLETIONS, **small)
    wrong = (
        {"max_tokens": "x"},
        {"prompt": []},
        {"model": "y"},
        {"temperatur": 1},
        {"seed": -(2**70)},
        {"stop": "a" * 300},
    )
    errors = [error(opened, small | one) for one in wrong]
    monkeypatch.setattr("tandem.cluster.frontends.openai.generation_route.read_requests.__code__", not_here.__code__)
    assert answer(opened.http, COMPLETIONS, **large)["choices"] == expected["choices"]
    assert [error(opened, large | one) for one in wrong] == errors


def error(opened: OpenGateway, body: dict[str, Any]) -> tuple[int, Any]:
    response = post(opened.http, COMPLETIONS, body)
    return response.status_code, refused(response, 404 if "model" in body else 400)


def test_a_long_chat_is_rendered_in_another_process(opened: OpenGateway) -> None:
    messages = [{"role": "user", "content": "a"}, *({"role": "user", "content": ""} for _ in range(200))]
    short, long = ({"messages": messages[:count], "max_tokens": 2, "return_token_ids": True} for count in (2, 201))
    assert answer(opened.http, CHATS, **long)["choices"] == answer(opened.http, CHATS, **short)["choices"]


def over_grpc(opened: OpenGateway, text: str) -> str:
    code, details = told(opened, inference_pb2.GenerateRequest(text=text).SerializeToString())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    return details


def over_http(opened: OpenGateway, text: str) -> str:
    return refused(post(opened.http, COMPLETIONS, {"prompt": text}), 400)["message"]


@pytest.mark.parametrize("ask", [over_grpc, over_http])
@pytest.mark.parametrize("size", [40, 30_000], ids=["in the gateway", "in another process"])
def test_a_tokenizer_that_panics(opened: OpenGateway, ask: Callable[[OpenGateway, str], str], size: int) -> None:
    assert "the tokenizer fails on this text: Onig: Regex search error: retry-limit" in ask(opened, PANICS[:size])
    assert len(answer(opened.http, COMPLETIONS, prompt="abc", max_tokens=2, return_token_ids=True)["choices"]) == 1


def test_a_tokenizer_that_takes_too_long(opened: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "READ_SECONDS", 0.01)
    assert "takes more than 0.01 s to read and to tokenize" in over_grpc(opened, PANICS)


def said(connection: socket.socket, last: bytes) -> bytes:
    """Returns the connection's bytes up to the text `last`."""
    data = b""
    while last not in data:
        data += connection.recv(1 << 16)
        assert data, "the connection has ended"
    return data


class TestBudget:
    def test_unfinished_bodies_over_http(self, model: Path) -> None:
        """The first one over is refused with a hint, others are served, and what goes away makes room."""
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with open_gateway(model, LIMITED) as opened, ExitStack() as stack:

            def begun(length: str) -> socket.socket:
                connection = stack.enter_context(connected(opened.http))
                connection.sendall(f"{head}{length}\r\n\r\n".encode())
                return connection

            first = begun(f"content-length: {MIB}")
            until(lambda: opened.gateway._bodies.held == MIB)
            late = said(begun(f"content-length: {MIB}"), b"allowed")
            assert late.startswith(b"HTTP/1.1 429")
            assert b"\r\nretry-after: 1\r\n" in late
            assert b"requests of 2 MiB are being received from this host; at most 1 MiB are allowed" in late
            chunked = begun("transfer-encoding: chunked")
            chunked.sendall(b"20000\r\n" + b" " * 0x20000 + b"\r\n")
            assert said(chunked, b"allowed").startswith(b"HTTP/1.1 429")
            assert answer(opened.http, COMPLETIONS, prompt="abc", max_tokens=2)["choices"]
            first.close()
            until(lambda: opened.gateway._bodies.held == 0)

    def test_messages_that_come_slowly_over_grpc(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.grpc_server.SLOW_SECONDS", 0.001)
        with open_gateway(model, LIMITED) as opened, unsaid(opened.grpc, GENERATE) as first:
            until(lambda: opened.gateway._bodies.held == MIB)
            with unsaid(opened.grpc, GENERATE) as call:
                code, details = status(call)
                assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert details.startswith("requests of 2 MiB are being received from this host")
                assert dict(call.trailing_metadata())["retry-after-ms"] == "1000"
            first.cancel()
            until(lambda: opened.gateway._bodies.held == 0)

    def test_a_request_counts_until_it_is_validated(self, model: Path) -> None:
        """The bytes of its body are released then, though its call goes on."""
        large = {"prompt": "abc", "max_tokens": 2, "metadata": {"padding": "p" * 200_000}}
        with open_gateway(model, LIMITED, alone=True) as opened:
            asked = threading.Thread(target=answer, args=(opened.http, COMPLETIONS), kwargs=large)
            asked.start()
            until(lambda: opened.gateway._bodies.held)
            until(lambda: opened.running and not opened.gateway._bodies.held)
            opened.island_comes()
            asked.join(60)


def test_a_client_that_goes_away_while_its_body_is_read(opened: OpenGateway) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "metadata": {"padding": "p" * 200_000}}
    held = threading.Event()
    opened.events._loop.call_soon_threadsafe(held.wait, 5)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"http://{opened.http}{COMPLETIONS}", json=body, timeout=0.1, trust_env=False)
    held.set()
    until(lambda: not opened.gateway._bodies.held)
    assert answer(opened.http, COMPLETIONS, **body)["choices"]
