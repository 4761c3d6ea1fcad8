"""The HTTP server of a gateway whose workers answer as the test says: statuses, limits, and how it stops."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError, DeadlineExceeded, StartFailed
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.cluster.fake_processes import FakeProcesses
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.http_client import CHATS, COMPLETIONS, answer, chunks, get, post, refused, streaming
from tests.support.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("gateway"))


def tokens_of(parts: list[Any]) -> list[int]:
    return [token for part in parts for token in part["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def quiet(model: Path) -> Iterator[OpenGateway]:
    """Opens a gateway whose worker serves whatever comes."""
    with open_gateway(model) as opened:
        yield opened


class TestCalls:
    def test_a_good_one(self, quiet: OpenGateway) -> None:
        assert tokens_of([answer(quiet.http, COMPLETIONS, **BODY)]) == TOKENS

    @pytest.mark.parametrize("given", ["a", "7f3e.A_b:~+/=@-", "x" * 128])
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_clients_request_id(self, quiet: OpenGateway, given: str, stream: bool) -> None:
        response = post(quiet.http, COMPLETIONS, {**BODY, "stream": stream}, headers={"x-request-id": given})
        assert (response.status_code, response.headers["x-request-id"]) == (200, given)
        assert f'"cmpl-{given[:119]}-' in response.text

    def test_request_ids_are_made(self, quiet: OpenGateway) -> None:
        ids = [post(quiet.http, COMPLETIONS, BODY).headers["x-request-id"] for _ in range(2)]
        assert len({*ids}) == 2
        assert post(quiet.http, COMPLETIONS, BODY | {"max_tokens": 0}).headers["x-request-id"]
        assert "x-request-id" not in get(quiet.http, "/health").headers

    def test_a_line_for_each_request(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "tandem")
        with open_gateway(model, {"logging.access": True}) as opened:
            post(opened.http, COMPLETIONS, BODY, headers={"x-request-id": "mine", "client-id": "me"})
            post(opened.http, COMPLETIONS, BODY | {"prompt": [1], "max_tokens": 1 << 20})
        served, refused_one = [record.__dict__["fields"] for record in caplog.records if record.message == "request"]
        assert served["request_id"].startswith("mine-")
        assert (served["frontend"], served["client"], served["status"]) == ("http", "id:me", "length")
        assert (served["prompt_tokens"], served["output_tokens"]) == (len(PROMPT), len(TOKENS))
        assert 0 < served["first_token_seconds"] <= served["total_seconds"]
        assert (refused_one["status"], refused_one["output_tokens"]) == ("invalid_argument", 0)

    @pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", '{"a":1}', "é"])
    def test_bad_request_ids(self, quiet: OpenGateway, given: str) -> None:
        response = post(quiet.http, COMPLETIONS, BODY, headers={"x-request-id": given.encode()})
        assert refused(response, 400)["message"].startswith("x-request-id is ")
        assert response.headers["x-request-id"] != given

    def test_two_request_ids(self, quiet: OpenGateway) -> None:
        headers = [("x-request-id", "a"), ("x-request-id", "b")]
        assert "given 2 times" in refused(post(quiet.http, COMPLETIONS, BODY, headers=headers), 400)["message"]

    @pytest.mark.parametrize("path", ["/v1", "/v1/completions//", "/v1/images", "//v1/models", "/v1/models//"])
    def test_unknown_routes(self, quiet: OpenGateway, path: str) -> None:
        assert "/v1/chat/completions" in refused(get(quiet.http, path), 404)["message"]

    @pytest.mark.parametrize("host", ["tandem.example", "127.0.0.1.example:80", "[::1", "0x7f000001"])
    def test_names_of_others(self, quiet: OpenGateway, host: str) -> None:
        assert "localhost" in refused(get(quiet.http, "/v1/models", headers={"host": host}), 421)["message"]
        assert get(quiet.http, "/health", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1:1", "[::1]:8000"])
    def test_names_of_this_machine(self, quiet: OpenGateway, host: str) -> None:
        assert get(quiet.http, "/v1/models", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(("method", "path"), [("GET", COMPLETIONS), ("DELETE", CHATS), ("POST", "/health")])
    def test_wrong_methods(self, quiet: OpenGateway, method: str, path: str) -> None:
        response = httpx.request(method, f"http://{quiet.http}{path}", trust_env=False)
        assert method in refused(response, 405)["message"]
        assert response.headers["allow"] == ("GET, HEAD" if path == "/health" else "POST")

    @pytest.mark.parametrize(
        "headers",
        [{}, {"content-type": "text/plain"}, {"content-type": "application/json", "content-encoding": "gzip"}],
    )
    def test_content_types(self, quiet: OpenGateway, headers: dict[str, str]) -> None:
        message = refused(
            httpx.post(f"http://{quiet.http}{COMPLETIONS}", content=b"{}", headers=headers, trust_env=False), 415
        )["message"]
        assert message.startswith("content-")
        assert message.endswith(("; it must be application/json", "; leave it out, or send identity"))

    def test_a_content_type_with_a_charset(self, quiet: OpenGateway) -> None:
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert post(quiet.http, COMPLETIONS, BODY, headers=headers).status_code == 200

    def test_another_model(self, quiet: OpenGateway) -> None:
        error = refused(post(quiet.http, COMPLETIONS, {**BODY, "model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "'gpt-4'" in error["message"]
        assert quiet.gateway._names.model[0] in error["message"]

    @pytest.mark.parametrize(
        ("body", "param", "message"),
        [
            ({**BODY, "top_p": 2}, "top_p", "top_p is 2.0; it must be in (0, 1]"),
            ({**BODY, "n": 129}, "n", "n is 129; it must be in [1, 128]"),
            ({**BODY, "n": 2, "best_of": 1}, "best_of", "best_of is 1; it must be in [n, 128], where n is 2"),
            ({**BODY, "prompt": [[5], []]}, "prompt", "prompt[1] has 0 token ids; it must have from 1 to 255"),
            ({**BODY, "prompt": [[5], [6, 1 << 30]]}, "prompt", "prompt[1][1] is 1073741824; the vocabulary has"),
            ({**BODY, "prompt": [[5], [5] * 256]}, "prompt", "prompt[1] has 256 token ids; it must have from 1 to 255"),
            ({**BODY, "prompt": [5, 1 << 30]}, "prompt", "prompt[1] is 1073741824; the vocabulary has"),
            ({**BODY, "prompt": "text"}, "prompt", "prompt: the checkpoint has no tokenizer.json; send a list"),
            ({**BODY, "stop": "x"}, "stop", "stop: stop strings need a tokenizer"),
            ({**BODY, "max_tokens": 254}, "max_tokens", "max_tokens is 254 after a prompt of 3 tokens; the model's"),
            ({**BODY, "prompt": [5] * 256}, "prompt", "prompt has 256 token ids; it must have from 1 to 255"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_bad_requests(self, quiet: OpenGateway, body: Any, param: str | None, message: str, stream: bool) -> None:
        """A stream has not begun by then."""
        error = refused(post(quiet.http, COMPLETIONS, {**body, "stream": stream}), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        long = "This model's maximum context length is 256 tokens. However, " * (error["code"] is not None)
        assert error["message"].startswith(long + message)
        assert error["code"] in (None, "context_length_exceeded")

    def test_a_chat_without_a_tokenizer(self, quiet: OpenGateway) -> None:
        error = refused(post(quiet.http, CHATS, {"messages": [{"role": "user", "content": "a"}]}), 400)
        assert error["param"] == "messages"
        assert error["message"] == (
            "messages: the checkpoint has no tokenizer.json; /v1/completions accepts a list of token ids as its prompt"
        )

    @pytest.mark.parametrize("stream", [False, True])
    def test_ignored_fields_are_listed_in_a_header(self, quiet: OpenGateway, stream: bool) -> None:
        answer = post(quiet.http, COMPLETIONS, {**BODY, "stream": stream, "colour": "red", "priority": 0})
        assert (answer.status_code, answer.headers["x-tandem-ignored"]) == (200, "colour")
        assert "x-tandem-ignored" not in post(quiet.http, COMPLETIONS, BODY).headers

    def test_what_is_no_json(self, quiet: OpenGateway) -> None:
        headers = {"content-type": "application/json"}
        response = httpx.post(f"http://{quiet.http}{CHATS}", content=b'{"a"', headers=headers, trust_env=False)
        assert "cannot be read as JSON" in refused(response, 400)["message"]

    @pytest.mark.parametrize("declared", [True, False])
    def test_huge_bodies(self, model: Path, declared: bool) -> None:
        data = b'{"prompt": "' + b"x" * (1 << 20)
        with open_gateway(model, {"gateway.max_message_mib": 1}) as opened:
            headers = {"content-type": "application/json"}
            content: Any = data if declared else iter([data])  # in chunks, with no length ahead
            response = httpx.post(f"http://{opened.http}{CHATS}", content=content, headers=headers, trust_env=False)
            assert "it may have at most 1048576" in refused(response, 413)["message"]

    def test_a_body_that_does_not_come(self, quiet: OpenGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem.cluster.frontends.http.body.BODY_SECONDS", 0.05)
        host, _, port = quiet.http.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            headers = ("host: localhost", "content-type: application/json", "content-length: 9")
            head = (f"POST {CHATS} HTTP/1.1", *headers, "", "")
            connection.sendall("\r\n".join(head).encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 408")

    def test_what_fails_unforeseen(self, quiet: OpenGateway, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        async def broken(*_: object, **__: object) -> None:
            raise KeyError("secret")

        monkeypatch.setattr(quiet.gateway._requests, "serve", broken)
        error = refused(post(quiet.http, COMPLETIONS, BODY), 500)
        assert (error["type"], "secret" in error["message"]) == ("server_error", False)
        assert "secret" in caplog.text

    def test_a_message_waits_for_one_turn(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """None for the first one; beside the one that the request itself waits for."""
        of_requests: list[FairTurns] = []
        of_messages: list[FairTurns] = []
        take, enter = FairTurns.take, FairTurns.enter

        async def taken(turns: FairTurns, cost: int = 1) -> None:
            of_requests.append(turns)
            await take(turns, cost)

        def entered(turns: FairTurns, call: Callable[[], object], cost: int = 1) -> None:
            of_messages.append(turns)
            enter(turns, call, cost)

        monkeypatch.setattr(FairTurns, "take", taken)
        monkeypatch.setattr(FairTurns, "enter", entered)
        with open_gateway(model) as opened:
            messages = chunks(opened.http, COMPLETIONS, **BODY)
            assert len(of_requests) == 1
            assert of_requests[0] not in of_messages
            assert len(set(of_messages)) == 1
            assert len(of_messages) == len(messages) - 1


class TestWorkersThatFail:
    @pytest.mark.parametrize("status", ["UNAVAILABLE", "ABORTED"])
    def test_a_stream_goes_on_after_a_loss(self, model: Path, status: str) -> None:
        with open_gateway(model, fails={"StartGenerate": ["go on", "go on", status]}) as opened:
            assert tokens_of(chunks(opened.http, COMPLETIONS, **BODY)) == TOKENS
            assert opened.worker.prompts == [PROMPT, PROMPT + TOKENS[:3]]

    @pytest.mark.parametrize(
        ("fails", "status", "kind"),
        [
            (["UNAVAILABLE"] * 2, 503, "server_error"),
            (["INTERNAL"] * 2, 500, "server_error"),
            (["INVALID_ARGUMENT"], 400, "invalid_request_error"),
            (["RESOURCE_EXHAUSTED"], 429, "rate_limit_error"),
            (["DEADLINE_EXCEEDED"], 504, "server_error"),
        ],
    )
    def test_statuses(self, model: Path, fails: list[str], status: int, kind: str) -> None:
        with open_gateway(model, {"gateway.max_attempts": 2}, {"RemoteSend": []}) as opened:
            for stream in (False, True):
                opened.worker.fails["RemoteSend"][:] = fails
                response = post(opened.http, COMPLETIONS, {**BODY, "stream": stream})
                assert refused(response, status)["type"] == kind
                assert ("retry-after" in response.headers) == (status == 429)

    def test_an_error_ends_a_stream_that_has_begun(self, model: Path) -> None:
        fails = {"StartGenerate": ["go on", "INVALID_ARGUMENT"]}
        with open_gateway(model, fails=fails) as opened, streaming(opened.http, COMPLETIONS, **BODY) as lines:
            *_, last = [line for line in lines if line]
        assert last.startswith('data: {"error":{"message":"')


class TestWaiting:
    def test_no_room_in_time(self, model: Path) -> None:
        with open_gateway(model, {"gateway.queue_seconds": 0.05}, alone=True) as opened:
            assert "gateway.queue_seconds" in refused(post(opened.http, COMPLETIONS, BODY), 504)["message"]

    def test_the_deadline_counts_in_the_queue_too(self, model: Path) -> None:
        with open_gateway(model, {"gateway.request_seconds": 0.05}, alone=True) as opened:
            response = httpx.post(f"http://{opened.http}{COMPLETIONS}", json=BODY, timeout=20, trust_env=False)
            assert "deadline passed while it was placed" in refused(response, 504)["message"]
            until(lambda: not opened.gateway._router.queued)

    def test_a_full_queue_says_when_to_come_again(self, model: Path) -> None:
        with open_gateway(model, {"gateway.max_queued": 1}, alone=True) as opened:
            first = threading.Thread(target=partial(answer, opened.http, COMPLETIONS, **BODY))
            first.start()
            until(lambda: opened.gateway._router.queued == 1)
            response = post(opened.http, COMPLETIONS, BODY)
            assert "gateway.max_queued is 1" in refused(response, 429)["message"]
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1
            opened.island_comes()
            first.join(30)

    def test_a_client_that_does_not_read(self, model: Path) -> None:
        """Whatever the frontend: nothing waits for it beyond its deadline."""
        never = asyncio.Event()

        async def write(_: object) -> None:
            await never.wait()

        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
        with open_gateway(model) as opened:
            with pytest.raises(DeadlineExceeded, match="did not read"):
                opened.events.run(opened.gateway._requests.serve(request, "c", write, seconds=0.1), timeout=20)
            until(lambda: len(opened.worker.ended) == 2)  # both workers know
            assert not opened.running

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_away(self, model: Path, stream: bool) -> None:
        with open_gateway(model, fails={"StartGenerate": ["hang"]}) as opened:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"http://{opened.http}{COMPLETIONS}", json={**BODY, "stream": stream}, timeout=0.3, trust_env=False
                )
            until(lambda: not opened.running)
            until(lambda: len(opened.worker.ended) == 2)
            assert opened.worker.writer_quiet == [False, True]


class TestStop:
    def test_calls_under_way_have_time(self, model: Path) -> None:
        with open_gateway(model, alone=True) as opened:
            answers: list[Any] = []
            asked = threading.Thread(target=lambda: answers.append(answer(opened.http, COMPLETIONS, **BODY)))
            asked.start()
            until(lambda: opened.running == 1)
            stopping = threading.Thread(target=lambda: opened.events.run(opened.gateway.stop(20), timeout=30))
            stopping.start()
            until(lambda: not _listens(opened.http))
            opened.island_comes()
            asked.join(20)
            assert tokens_of(answers) == TOKENS
            stopping.join(30)

    def test_but_no_longer(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        with open_gateway(model, fails={"StartGenerate": ["hang"] * 2}) as opened:
            answers: list[httpx.Response] = []
            asked = threading.Thread(target=lambda: answers.append(post(opened.http, COMPLETIONS, BODY)))
            asked.start()
            with streaming(opened.http, COMPLETIONS, **BODY) as lines:
                assert "choices" in next(lines)
                until(lambda: len(opened.worker.sent) == 2)
                opened.events.run(opened.gateway.stop(0.05), timeout=30)
                *_, last = [line for line in lines if line]
            assert last.startswith('data: {"error":{"message":"the cluster ends: it was stopped"')
            asked.join(20)
            assert "the cluster ends" in refused(answers[0], 503)["message"]
            assert len(opened.worker.ended) == 4  # both workers of both
            assert not caplog.records  # uvicorn has cancelled nothing


def test_prompts_that_are_read_end_with_the_gateway(model: Path) -> None:
    with open_gateway(model, fails={"ReadPrompts": ["hang"]}) as opened:
        answers: list[httpx.Response] = []
        body = {"input": PROMPT}
        asking = threading.Thread(target=lambda: answers.append(post(opened.http, "/v1/embeddings", body)))
        asking.start()
        until(lambda: opened.worker.priorities)
        opened.events.run(opened.gateway.stop(0.05), timeout=30)
        asking.join(20)
    assert "the cluster ends: it was stopped" in refused(answers[0], 503)["message"]


class TestPorts:
    def test_one_in_use_is_refused(self, quiet: OpenGateway, model: Path) -> None:
        port = int(quiet.http.rpartition(":")[2])
        refusal = rf"gateway\.http_port {port} on 127\.0\.0\.1 cannot be opened \(Address already in use\)"
        with pytest.raises(StartFailed, match=refusal), open_gateway(model, {"gateway.http_port": port}):
            pass
        config = load_config(None, {"model.path": str(model), "gateway.port": 0, "gateway.http_port": port})
        processes = FakeProcesses()
        with pytest.raises(StartFailed, match="choose a free one with --http-port"):
            Cluster(config, processes).start()
        assert not processes.specs

    def test_both_frontends_cannot_share_one(self) -> None:
        with pytest.raises(
            ConfigError, match=r"gateway\.http_port is 50051; it must be another one than gateway\.port"
        ):
            load_config(None, {"gateway.http_port": 50051})

    def test_the_cluster_says_where_it_is(self, quiet: OpenGateway) -> None:
        with Client(quiet.gateway._addresses.grpc) as client:
            assert client.cluster_info().http_address == quiet.http

    def test_small_events_are_sent_at_once(self, quiet: OpenGateway) -> None:
        """Connections have the options of the socket that they come through."""
        assert quiet.gateway._http is not None
        (listener,) = quiet.gateway._http._server.servers[0].sockets
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_over_ipv6(self, model: Path) -> None:
        with open_gateway(model, {"gateway.host": "::1"}) as opened:
            assert opened.http.startswith("[::1]:")
            assert get(opened.http, "/health").status_code == 200


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except ConnectionRefusedError:
        return False
    return True
