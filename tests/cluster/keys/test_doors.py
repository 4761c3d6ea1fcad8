"""Keys at the doors of a gateway: OpenAI's, Anthropic's and gRPC's."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.errors import RateLimited
from tandem.cluster.errors.details import DETAILS_KEY
from tandem.cluster.keys.access import Access
from tandem.cluster.keys.key import digest_of
from tandem.cluster.keys.key_cells import Unit
from tandem.cluster.metrics import scrape
from tandem.cluster.peers.table import KEY_SLOTS
from tandem.cluster.requests.charging.charges import RequestCharge
from tandem.cluster.requests.validation import ValidRequest
from tandem.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.sampling.guided import Guided
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.sampling.thinking import Thinking
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.cluster.open_gateway import PROMPT, OpenGateway, open_gateway
from tests.cluster.scripted_model import make_scripted
from tests.support.http_client import get, post

TOKEN = "an-operators-token"
COMPLETIONS, MESSAGES, CHATS = "/v1/completions", "/v1/messages", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 6}


SHORT, LAST = [90, 91, 92], 99  # a prompt with a short answer, and how that ends


def never_ends(sequence: list[int]) -> int:
    if sequence[:3] == SHORT and len(sequence) > 8:
        return LAST
    return 5 + len(sequence) % 90


@dataclass
class Keyed:
    """A gateway with a keys file that a test writes."""

    opened: OpenGateway
    file: Path
    model: Path
    count: int = 0

    def use(self, **fields: Any) -> str:
        """A key of the file, which holds it alone: each test has a name of its own."""
        self.count += 1
        return self.write([{"name": f"team-{self.count}", **fields}])[0]

    def write(self, entries: list[dict[str, Any]]) -> list[str]:
        keys = [f"tdm-{one['name']}" for one in entries]
        whole = [{"sha256": digest_of(key).hex(), **one} for key, one in zip(keys, entries, strict=True)]
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps({"keys": whole}))
        os.replace(fresh, self.file)
        self.opened.events.run(self.opened.gateway._callers.start(), timeout=10)
        return keys

    @property
    def name(self) -> str:
        return f"team-{self.count}"

    def post(self, path: str, body: Any, key: str, **headers: str) -> httpx.Response:
        return post(self.opened.http, path, body, headers={"authorization": f"Bearer {key}", **headers})

    def get(self, path: str, key: str) -> httpx.Response:
        return get(self.opened.http, path, headers={"authorization": f"Bearer {key}"})

    def metric(self, name: str, **labels: str) -> float:
        pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
        wanted = f"{{{pairs}}}" if pairs else ""
        time.sleep(0.25)  # one scrape serves all that come so soon
        lines = self.get("/metrics", TOKEN).text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{wanted} "))

    @property
    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.opened.grpc)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keys")
    file = folder / "keys.yaml"
    file.write_text("keys: []")
    model = make_scripted(folder / "model")
    options = {
        "security.keys_file": str(file),
        "security.api_key": TOKEN,
        "model.served_model_name": ["base", "b"],
        "logging.access": True,
        "gateway.cors_origins": ["*"],
        "gateway.queue_seconds": 0.5,
        "embeddings.score_template": "{query} {document}",
        "embeddings.score_tokens": ["a", "b"],
    }
    with open_gateway(model, options, say=never_ends, stop_token=LAST, max_model_len=1024) as opened:
        yield Keyed(opened, file, model)


def test_a_key_opens_the_doors_of_inference(keyed: Keyed) -> None:
    key = keyed.use()
    assert keyed.post(COMPLETIONS, BODY, key).json()["usage"]["completion_tokens"] == 6
    assert keyed.post(MESSAGES, TALK, key).json()["usage"]["output_tokens"] == 6
    assert post(keyed.opened.http, MESSAGES, TALK, headers={"x-api-key": key}).status_code == 200
    assert keyed.post("/tokenize", {"prompt": "a"}, key).status_code == 200
    assert [one["id"] for one in keyed.get("/v1/models", key).json()["data"]] == ["base", "b"]
    with Client(keyed.opened.grpc, security=ClientSecurity(token=key)) as client:
        assert sum(len(one.token_ids) for one in client.generate(PROMPT, max_tokens=5)) == 5
        assert client.model_info().name == "base"


def test_series_of_many_keys_hold_up_no_stream(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a thousand keys take 70 ms to write."""
    threads: list[threading.Thread] = []

    def families(sums: object) -> list[Any]:
        threads.append(threading.current_thread())
        return []

    async def streams() -> threading.Thread:
        return threading.current_thread()

    monkeypatch.setattr(scrape, "key_families", families)
    time.sleep(0.25)  # one scrape serves all that come so soon
    assert keyed.get("/metrics", TOKEN).status_code == 200
    assert len(threads) == 1
    assert keyed.opened.events.run(streams(), timeout=10) not in threads


def test_other_keys_open_none(keyed: Keyed) -> None:
    key = keyed.use()
    for wrong in (f"{key}x", key[:-1], "x" * 5000, digest_of(key).hex()):
        refused = keyed.post(COMPLETIONS, BODY, wrong)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    stub = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), f"{key}x")
    with pytest.raises(grpc.RpcError) as error:
        stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_operators_have_no_limits(keyed: Keyed) -> None:
    keyed.use(requests_per_minute=1)
    assert [keyed.post(COMPLETIONS, BODY, TOKEN).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("path", ["/metrics", "/status", "/load", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_routes_of_operators_are_forbidden(keyed: Keyed, path: str) -> None:
    key = keyed.use()
    refused = keyed.post(path, {}, key) if "lora" in path else keyed.get(path, key)
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"
    assert f"{path} is for operators; the key '{keyed.name}'" in refused.json()["error"]["message"]
    assert keyed.get("/health", key).status_code == get(keyed.opened.http, "/ready").status_code == 200


def test_methods_of_operators_are_forbidden(keyed: Keyed) -> None:
    key = keyed.use()
    stub = authorized(admin_pb2_grpc.AdminStub(keyed.channel), key)
    for call, request in [(stub.Scale, admin_pb2.ScaleRequest()), (stub.ListAdapters, admin_pb2.ListAdaptersRequest())]:
        with pytest.raises(grpc.RpcError, match="is for operators") as error:
            call(request, timeout=10)
        assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
    assert keyed.metric("tandem:key_refused_total", key=keyed.name, reason="route") == 2


def test_requests_beyond_the_limit_get_429(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=2, tokens_per_minute=1000)
    assert [keyed.post(COMPLETIONS, BODY, key).status_code for _ in range(3)] == [200, 200, 429]
    refused = keyed.post(COMPLETIONS, BODY, key)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "has used 2 of its 2 requests a minute; try again in" in error["message"]
    assert 50 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    shown = refused.headers["access-control-expose-headers"].split(", ")
    assert {name for name in refused.headers if "ratelimit" in name} < {*shown}
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-limit-tokens"] == "1000"
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * (len(PROMPT) + 6))
    assert 50 <= float(refused.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 61
    assert keyed.metric("tandem:key_requests_total", key=keyed.name) == 2
    assert keyed.metric("tandem:key_prompt_tokens_total", key=keyed.name) == 2 * len(PROMPT)
    assert keyed.metric("tandem:key_output_tokens_total", key=keyed.name) == 12
    assert keyed.metric("tandem:key_refused_total", key=keyed.name, reason="requests") == 2
    rejected = keyed.metric("tandem:rejected_total", code="429", engine="0", frontend="http", model_name="base")
    assert rejected == 0  # the cluster had room


def test_anthropic_says_it_in_its_words(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1)
    keyed.post(MESSAGES, TALK, key)
    refused = keyed.post(MESSAGES, TALK, key)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) > 50
    headers = {name: value for name, value in refused.headers.items() if name.startswith("anthropic-ratelimit")}
    assert headers.pop("anthropic-ratelimit-requests-reset").endswith("Z")
    assert headers == {"anthropic-ratelimit-requests-limit": "1", "anthropic-ratelimit-requests-remaining": "0"}
    assert keyed.post(f"{MESSAGES}/count_tokens", TALK, key).status_code == 429


def test_grpc_says_it_with_a_delay(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1)
    stub = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
    assert list(stub.Generate(request, timeout=10))
    with pytest.raises(grpc.RpcError, match="of its 1 requests a minute") as error:
        list(stub.Generate(request, timeout=10))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    trailing: dict[str, Any] = dict(error.value.trailing_metadata())  # type: ignore[attr-defined]
    assert int(trailing["retry-after-ms"]) > 50_000
    assert b"google.rpc.RetryInfo" in trailing[DETAILS_KEY]
    with Client(keyed.opened.grpc, security=ClientSecurity(token=key)) as client, pytest.raises(RateLimited):
        list(client.generate(PROMPT, max_tokens=5, timeout=1))


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        (COMPLETIONS, {**BODY, "max_tokens": 50}, 100 - 53),
        (COMPLETIONS, {**BODY, "max_tokens": 10, "n": 3, "best_of": 4}, 100 - 43),
        (COMPLETIONS, {"prompt": [PROMPT, PROMPT], "max_tokens": 5}, 100 - 16),
    ],
)
def test_tokens_are_prompts_and_outputs(keyed: Keyed, path: str, body: dict[str, Any], left: int) -> None:
    key = keyed.use(tokens_per_minute=100)
    assert keyed.post(path, body, key).status_code == 200
    refused = keyed.post(path, {"prompt": [5], "max_tokens": left}, key)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, str(left))
    assert keyed.post(path, {"prompt": [5], "max_tokens": left - 1}, key).status_code == 200


def test_what_is_not_produced_is_given_back(keyed: Keyed) -> None:
    key = keyed.use(tokens_per_minute=200)
    used = keyed.post(COMPLETIONS, {"prompt": SHORT, "max_tokens": 100}, key).json()["usage"]["total_tokens"]
    assert used < 20
    refused = keyed.post(COMPLETIONS, {**BODY, "max_tokens": 195}, key)
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(200 - used)


def test_a_request_without_a_length_ends_where_its_count_does(keyed: Keyed) -> None:
    key = keyed.use(tokens_per_minute=800)
    prompt = keyed.post(CHATS, {**TALK, "max_tokens": 1}, key).json()["usage"]["prompt_tokens"]
    answered = keyed.post(CHATS, {"messages": TALK["messages"]}, key).json()
    assert (answered["usage"]["completion_tokens"], answered["choices"][0]["finish_reason"]) == (200, "length")
    many = keyed.post(CHATS, {"messages": TALK["messages"], "n": 4}, key).json()
    assert many["usage"]["completion_tokens"] == 200
    used = 401 + 3 * prompt
    refused = keyed.post(CHATS, {**TALK, "max_tokens": 700}, key)
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(800 - used)
    free = keyed.use()
    assert keyed.post(CHATS, {"messages": TALK["messages"]}, free).json()["usage"]["completion_tokens"] > 900


def test_an_open_request_may_have_a_part_of_what_is_left(keyed: Keyed) -> None:
    key = keyed.use(tokens_per_minute=2400)
    opened = {"messages": TALK["messages"]}
    lengths = [keyed.post(CHATS, opened, key).json()["usage"]["completion_tokens"] for _ in range(2)]
    assert lengths == [600, 600]


def test_tokens_that_a_client_says_to_have_count_as_a_prompt(keyed: Keyed) -> None:
    """Workers compute them again."""
    key = keyed.use(tokens_per_minute=1000)
    stub = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key)
    known = [never_ends(PROMPT + [0] * count) for count in range(500)]
    request = inference_pb2.GenerateRequest(
        request_id="r",
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=inference_pb2.SamplingParams(max_tokens=510),
        resume=inference_pb2.Resume(token_ids=known),
    )
    assert sum(len(part.token_ids) for part in stub.Generate(request, timeout=10)) == 10
    refused = keyed.post(COMPLETIONS, {**BODY, "max_tokens": 900}, key)
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(1000 - len(PROMPT) - 510)


def test_a_request_that_can_never_pass_is_refused_for_good(keyed: Keyed) -> None:
    key = keyed.use(tokens_per_minute=100)
    refused = keyed.post(COMPLETIONS, {**BODY, "max_tokens": 98}, key)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("max_tokens asks for 98 tokens, over all answers, after 3 of")
    assert "has 100 tokens a minute, and no request may need more" in refused.json()["error"]["message"]
    refused = keyed.post(COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 1}, key)
    assert (refused.status_code, "the prompt has 100 tokens" in refused.text) == (400, True)
    assert keyed.post(COMPLETIONS, {**BODY, "max_tokens": 97}, key).status_code == 200
    assert keyed.metric("tandem:key_refused_total", key=keyed.name, reason="size") == 2


def test_a_list_of_prompts_passes_whole_or_counts_nothing(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=3, tokens_per_minute=100)
    refused = keyed.post(COMPLETIONS, {**BODY, "prompt": [PROMPT] * 4}, key)
    said = f"prompt has 4 entries, each of them a request; the key '{keyed.name}' has 3 requests a minute"
    assert (refused.status_code, said in refused.text) == (400, True)
    refused = keyed.post(COMPLETIONS, {"prompt": [PROMPT] * 3, "max_tokens": 40}, key)
    said = f"the body asks for 129 tokens or more, over all its entries; the key '{keyed.name}' has 100 tokens a minute"
    assert (refused.status_code, said in refused.text) == (400, True)
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 200
    many = {**BODY, "prompt": [PROMPT] * 3}
    assert [keyed.post(COMPLETIONS, many, key).status_code for _ in range(3)] == [429] * 3
    assert [keyed.post(COMPLETIONS, BODY, key).status_code for _ in range(3)] == [200, 200, 429]


def test_thinking_leaves_room_in_what_a_key_may_have() -> None:
    params = SamplingParams(max_tokens=100_000, guided=Guided("regex", ("a",), Thinking("<t>", "</t>")).within(100_000))
    request = ValidRequest("r", PromptSpec(np.arange(3)), params)
    few = RequestCharge(Few(), request, is_open=True).request.params
    assert few.guided is not None
    assert (few.max_tokens, few.guided.thinking_tokens) == (400, 100)


class Few(Access):
    def most_open(self, prompt: int, output: int) -> int:
        return 400


def test_a_key_sees_no_workers(keyed: Keyed) -> None:
    for token, seen in [(keyed.use(), 0), (TOKEN, 1)]:
        with Client(keyed.opened.grpc, security=ClientSecurity(token=token)) as client:
            info = client.cluster_info()
        assert (len(info.islands), len(info.gateways), info.http_address) == (seen, seen, keyed.opened.http)


def test_requests_that_are_wrong_do_not_count(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1)
    assert [keyed.post(COMPLETIONS, {**BODY, "n": 0}, key).status_code for _ in range(3)] == [400] * 3
    assert [keyed.post("/detokenize", {"tokens": "a"}, key).status_code for _ in range(3)] == [400] * 3
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 200


def test_a_client_that_leaves_pays_for_what_it_got(keyed: Keyed) -> None:
    key = keyed.use(tokens_per_minute=2000)
    stub = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key)
    sampling = inference_pb2.SamplingParams(max_tokens=900)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), sampling=sampling)
    call = stub.Generate(request, timeout=10)
    next(call)
    call.cancel()
    wait_for(lambda: keyed.opened.running == 0)
    produced = int(keyed.metric("tandem:key_output_tokens_total", key=keyed.name))
    assert 0 < produced <= 900
    assert keyed.metric("tandem:key_prompt_tokens_total", key=keyed.name) == len(PROMPT)
    left = 2000 - len(PROMPT) - produced
    many = {**BODY, "n": 2, "max_tokens": (left - len(PROMPT)) // 2 + 1}
    assert keyed.post(COMPLETIONS, many, key).headers["x-ratelimit-remaining-tokens"] == str(left)


def wait_for(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_models_that_a_key_may_not_use_are_unknown_to_it(keyed: Keyed) -> None:
    key = keyed.use(models=["b", "my-lora"])
    assert [one["id"] for one in keyed.get("/v1/models", key).json()["data"]] == ["b"]
    assert keyed.get("/v1/models/base", key).status_code == 404
    for path, body in [(COMPLETIONS, BODY), (CHATS, TALK), (MESSAGES, TALK), ("/tokenize", {"prompt": "a"})]:
        refused = keyed.post(path, {**body, "model": "base"}, key)
        assert refused.status_code == 404
        assert "model is 'base'; 'b' is served here" in refused.text
        assert keyed.post(path, {**body, "model": "b"}, key).status_code == 200
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 200  # a name of the model is allowed
    assert keyed.metric("tandem:key_refused_total", key=keyed.name, reason="model") == 5


def test_a_key_for_an_adapter_alone_has_to_name_it(keyed: Keyed) -> None:
    key = keyed.use(models=["my-lora"])
    refused = keyed.post(COMPLETIONS, BODY, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "model is missing; none is served here" in refused.text
    stub = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key)
    for model in ("", "base"):
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), model=model)
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(request, timeout=10))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    embed = keyed.post("/v1/embeddings", {"input": "a"}, key)
    assert embed.status_code == 404


def test_priorities_stay_within_a_keys_bounds(keyed: Keyed) -> None:
    key = keyed.use(priority={"lowest": 3, "highest": 7})
    asked = [(3, 200), (7, 200), (2, 400), (8, 400), (0, 400)]
    assert [keyed.post(COMPLETIONS, {**BODY, "priority": one}, key).status_code for one, _ in asked] == [
        status for _, status in asked
    ]
    refused = keyed.post(COMPLETIONS, {**BODY, "priority": 2}, key).json()["error"]["message"]
    assert refused == f"priority is 2; it must be from 3 to 7 (the key '{keyed.name}')"
    keyed.opened.worker.priorities.clear()
    for tier in ({}, {"service_tier": "priority"}, {"service_tier": "flex"}):
        assert keyed.post(COMPLETIONS, {**BODY, **tier}, key).status_code == 200
    assert keyed.opened.worker.priorities == [3, 3, 7]
    assert keyed.metric("tandem:key_refused_total", key=keyed.name, reason="priority") == 4


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_prompts_that_nobody_decodes_count(keyed: Keyed, path: str) -> None:
    body: dict[str, Any] = {"input": [PROMPT, PROMPT]} if path == "/v1/embeddings" else {"text_1": "x", "text_2": "y"}
    key = keyed.use(tokens_per_minute=100, priority={"lowest": 2, "highest": 4})
    keyed.opened.worker.width = json.loads((keyed.model / "config.json").read_text())["hidden_size"]
    used = keyed.post(path, body, key).json()["usage"]["prompt_tokens"]
    assert keyed.opened.worker.priorities[-1] == 2
    assert "it must be from 2 to 4" in keyed.post(path, {**body, "priority": 5}, key).json()["error"]["message"]
    refused = keyed.post(COMPLETIONS, {**BODY, "max_tokens": 97}, key)
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(100 - used)
    large = {"input": [[5] * 60, [6] * 60]} if path == "/v1/embeddings" else {"text_1": "x" * 400, "text_2": "y"}
    assert "no request may need more" in keyed.post(path, large, key).text
    once = keyed.use(requests_per_minute=1)
    assert [keyed.post(path, body, once).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_prompts_that_fail_count_once_a_worker_has_them(keyed: Keyed, path: str) -> None:
    body: dict[str, Any] = {"input": PROMPT} if path == "/v1/embeddings" else {"text_1": "x", "text_2": "y"}
    key = keyed.use(requests_per_minute=2, tokens_per_minute=1000)
    keyed.opened.worker.width = json.loads((keyed.model / "config.json").read_text())["hidden_size"]
    keyed.opened.worker.fails["ReadPrompts"] = ["RESOURCE_EXHAUSTED"] * 1000
    assert keyed.post(path, body, key).status_code >= 500
    keyed.opened.worker.fails.clear()
    used = keyed.post(path, body, key).json()["usage"]["prompt_tokens"]
    keyed.opened.worker.fails["ReadPrompts"] = ["INTERNAL"] * 2
    assert keyed.post(path, body, key).status_code >= 500
    keyed.opened.worker.fails.clear()
    refused = keyed.post(path, body, key)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, str(1000 - 2 * used))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score"])
def test_prompts_whose_workers_die_count_once(keyed: Keyed, path: str) -> None:
    body: dict[str, Any] = {"input": PROMPT} if path == "/v1/embeddings" else {"text_1": "x", "text_2": "y"}
    key = keyed.use(requests_per_minute=2, tokens_per_minute=1000)
    worker, links = keyed.opened.worker, keyed.opened.gateway._islands.links().values()
    worker.width = json.loads((keyed.model / "config.json").read_text())["hidden_size"]

    def asked(call: str, count: int) -> httpx.Response:
        worker.fails[call] = ["UNAVAILABLE"] * count
        answer = keyed.post(path, body, key)
        worker.fails.clear()
        wait_for(lambda: all(link.reachable for link in links))
        return answer

    assert asked("ReadPrompts", 1000).status_code >= 500  # no worker had it, so it does not count
    again = asked("queued ReadPrompts", 1)
    assert again.status_code == 200
    assert asked("queued ReadPrompts", 1000).status_code >= 500
    refused, used = keyed.post(path, body, key), again.json()["usage"]["prompt_tokens"]
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, str(1000 - 2 * used))
    assert keyed.metric("tandem:key_prompt_tokens_total", key=keyed.name) == 2 * used


def test_prompts_count_whose_worker_leaves_with_its_island(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1, tokens_per_minute=1000)
    worker, gateway = keyed.opened.worker, keyed.opened.gateway
    worker.fails |= {"ReadPrompts": ["go on", *["UNAVAILABLE"] * 1000], "queued ReadPrompts": ["hang"]}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keyed.post, "/v1/embeddings", {"input": PROMPT}, key)
        wait_for(lambda: not worker.fails["queued ReadPrompts"])
        keyed.opened.events.run(gateway.update_island(worker.state("i", epoch=2, version=2)), timeout=10)
        assert asking.result(30).status_code >= 500
    worker.fails.clear()
    wait_for(lambda: all(link.reachable for link in gateway._islands.links().values()))
    refused = keyed.post("/v1/embeddings", {"input": PROMPT}, key)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, str(1000 - len(PROMPT)))


def test_requests_that_tokenize_count(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=2)
    calls = [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]}), ("/tokenize", {"prompt": "a"})]
    assert [keyed.post(path, body, key).status_code for path, body in calls] == [200, 200, 429]


def test_what_no_worker_took_does_not_count(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1, tokens_per_minute=100)
    keyed.opened.worker.fails["PrepareReceive"] = ["RESOURCE_EXHAUSTED"] * 1000
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 504
    keyed.opened.worker.fails.clear()
    assert [keyed.post(COMPLETIONS, BODY, key).status_code for _ in range(2)] == [200, 429]


def test_a_call_that_its_client_ends_counts_without_tokens(keyed: Keyed) -> None:
    key = keyed.use(requests_per_minute=1, tokens_per_minute=100)
    keyed.opened.worker.fails["PrepareReceive"] = ["RESOURCE_EXHAUSTED"] * 1000
    call = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key).Generate(
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT)), timeout=10
    )
    wait_for(lambda: keyed.opened.running == 1)
    call.cancel()
    wait_for(lambda: keyed.opened.running == 0)
    keyed.opened.worker.fails.clear()
    refused = keyed.post(COMPLETIONS, BODY, key)
    assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "100")


def test_a_key_is_a_client(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it says of itself. Keys take turns, not ids."""
    caplog.set_level("INFO", "tandem.cluster.tracing.access_log")
    key = keyed.use()
    keyed.post(COMPLETIONS, BODY, key, **{"client-id": "somebody else"})
    keyed.post(COMPLETIONS, BODY, TOKEN, **{"client-id": "somebody else"})
    wait_for(lambda: len([one for one in caplog.records if one.message == "request"]) == 2)
    lines = [one.fields for one in caplog.records if one.message == "request"]  # type: ignore[attr-defined]
    assert [(one["client"], one["key"]) for one in lines] == [
        (f"key:{keyed.name}", keyed.name),
        ("id:somebody else", ""),
    ]


def test_ids_of_unlike_keys_do_not_meet(keyed: Keyed) -> None:
    one, other = keyed.write([{"name": "one"}, {"name": "other"}])
    stubs = [authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key) for key in (one, other)]
    sampling = inference_pb2.SamplingParams(max_tokens=60)
    keyed.opened.worker.step_seconds = 0.01
    request = inference_pb2.GenerateRequest(
        request_id="r", token_ids=inference_pb2.TokenIds(ids=PROMPT), sampling=sampling
    )
    first = stubs[0].Generate(request, timeout=10)
    next(first)
    second = stubs[1].Generate(request, timeout=10)
    next(second)
    again = authorized(inference_pb2_grpc.InferenceStub(keyed.channel), one)
    with pytest.raises(grpc.RpcError, match="request_id 'r' is in use"):
        list(again.Generate(request, timeout=10))
    assert [1 + sum(len(part.token_ids) for part in call) for call in (first, second)] == [60, 60]
    keyed.opened.worker.step_seconds = 0.0


def test_a_key_forks_its_own_requests_only(keyed: Keyed) -> None:
    one, other = keyed.write([{"name": "one"}, {"name": "other"}])
    stubs = [authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key) for key in (one, other)]
    keyed.opened.worker.step_seconds = 0.01
    parent = stubs[0].Generate(
        inference_pb2.GenerateRequest(
            request_id="p",
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=200),
        ),
        timeout=10,
    )
    next(parent)
    fork = inference_pb2.GenerateRequest(
        fork=inference_pb2.Fork(request_id="p"), sampling=inference_pb2.SamplingParams(max_tokens=2)
    )
    assert sum(len(part.token_ids) for part in stubs[0].Generate(fork, timeout=10)) == 2
    with pytest.raises(grpc.RpcError, match="'p'"):
        list(stubs[1].Generate(fork, timeout=10))
    parent.cancel()
    keyed.opened.worker.step_seconds = 0.0


def test_a_changed_file_counts_within_a_second(keyed: Keyed) -> None:
    (kept,) = keyed.write([{"name": "kept", "requests_per_minute": 3}])
    assert keyed.post(COMPLETIONS, BODY, kept).status_code == 200
    entries = [{"name": "kept", "requests_per_minute": 1}, {"name": "added"}]
    whole = [{**one, "sha256": digest_of(f"tdm-{one['name']}").hex()} for one in entries]
    keyed.file.write_text(json.dumps({"keys": whole}))  # in place, and nobody tells the gateway
    wait_for(lambda: keyed.post(COMPLETIONS, BODY, "tdm-added").status_code == 200)
    assert keyed.post(COMPLETIONS, BODY, kept).status_code == 429  # what it had used counts under the new limit
    keyed.write([{"name": "added"}])
    assert keyed.post(COMPLETIONS, BODY, kept).status_code == 401


def test_a_key_without_a_slot_is_served_once_one_is_free(keyed: Keyed) -> None:
    book, second = keyed.opened.gateway._callers.book, int(time.monotonic())
    assert book is not None
    slots = book._cells.open(range(1, KEY_SLOTS + 1), second)  # names that the file had within a minute
    for slot in slots.values():
        book._cells.add(slot, Unit.REQUESTS, 1, second)
    key = keyed.use()
    for path, body in ((COMPLETIONS, BODY), (MESSAGES, TALK)):
        refused = keyed.post(path, body, key)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert f"no free slot to count the key '{keyed.name}'" in refused.json()["error"]["message"]
    with pytest.raises(grpc.RpcError) as failed:
        next(
            authorized(inference_pb2_grpc.InferenceStub(keyed.channel), key).Generate(
                inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT)), timeout=10
            )
        )
    assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata: Any = failed.value.trailing_metadata()  # type: ignore[attr-defined]
    assert dict(metadata)["retry-after-ms"] == "1000"
    labels = {"code": "RESOURCE_EXHAUSTED", "engine": "0", "frontend": "grpc", "model_name": "base"}
    assert keyed.metric("tandem:rejected_total", **labels) == 0  # it says nothing of the cluster's load
    assert keyed.post(COMPLETIONS, BODY, "tdm-unknown").status_code == 401
    for slot in slots.values():
        book._cells.take_back(slot, Unit.REQUESTS, 1, second)
    wait_for(lambda: keyed.post(COMPLETIONS, BODY, key).status_code == 200)


def test_a_bad_file_is_told_once_and_changes_nothing(keyed: Keyed, caplog: pytest.LogCaptureFixture) -> None:
    key = keyed.use()
    before = keyed.metric("tandem:keys_file_errors_total", engine="0", model_name="base")
    keyed.file.write_text("keys: [{name: a}]")
    wait_for(lambda: "keys[0].sha256 (a) is missing" in caplog.text)
    time.sleep(1.2)
    told = [one.message for one in caplog.records if "is missing" in one.message]
    assert len(told) == 1
    assert told[0].endswith("the 1 keys from before stay")
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 200
    assert keyed.metric("tandem:keys_file_stale") == 1
    keyed.file.unlink()
    wait_for(lambda: "cannot be read: No such file" in caplog.text)
    assert keyed.post(COMPLETIONS, BODY, key).status_code == 200
    assert keyed.metric("tandem:keys_file_errors_total", engine="0", model_name="base") == before + 2
    assert keyed.post(COMPLETIONS, BODY, keyed.use()).status_code == 200
    assert keyed.metric("tandem:keys_file_stale") == 0
