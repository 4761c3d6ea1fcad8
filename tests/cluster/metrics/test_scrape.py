"""Tests what /metrics reports of requests through both frontends of a gateway whose workers are scripted."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.errors import CallError, InvalidRequest, ServerError
from tandem.cluster.scaling import ScalingState
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, OpenGateway, open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete
from tests.support.http_client import COMPLETIONS, answer, chunks, get, post
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
# The names of vLLM's V1 engine, as its documentation lists them, without those of features that are not here.
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "cache_config_info",
)
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def gateway(model: Path) -> Iterator[OpenGateway]:
    with open_gateway(model) as opened:
        yield opened


def scrape(gateway: OpenGateway) -> Samples:
    """One that was made after this call."""
    begun = scraped(gateway).at
    until(lambda: scraped(gateway).at > begun)
    return scraped(gateway)


def scraped(gateway: OpenGateway) -> Samples:
    response = get(gateway.http, "/metrics")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Samples(response.text)


def test_all_of_vllms_names_are_there_before_the_first_request(gateway: OpenGateway) -> None:
    found = scraped(gateway)
    wanted = {f"vllm:{name}" for name in GAUGES} | {f"vllm:{name}_total" for name in COUNTERS}
    wanted |= {f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert wanted <= found.names
    for name in wanted:
        for labels, _ in found.series(name):
            assert labels.items() >= {"model_name": gateway.gateway._names.model[0], "engine": "0"}.items()


def test_what_the_guide_says_to_watch_is_there(model: Path, tmp_path: Path) -> None:
    guide = (ROOT / "docs/deploy.md").read_text().partition("## Operating")[2]
    named = set(re.findall(r"`((?:vllm|tandem):\w+)`", guide))
    assert len(named) > 12
    keys, token = tmp_path / "keys.yaml", "an-operators-token"
    keys.write_text("keys: []")
    options = {"security.keys_file": str(keys), "security.api_key": token, "metrics.public": True}
    with open_gateway(model, options) as gateway:
        gateway.events.run(gateway.gateway.update_scaling(ScalingState(1, 4, 3, "waiting")), timeout=10)
        found = scrape(gateway)
        assert named <= {re.sub("_(total|bucket)$", "", name) for name in found.names}
        assert (found.total("tandem:islands"), found.total("tandem:wanted_islands")) == (1, 3)
        with Client(gateway.grpc, security=ClientSecurity(token=token)) as client:
            assert client.cluster_info().scaling.waits_for == "waiting"


def test_requests_through_both_frontends_count(gateway: OpenGateway) -> None:
    answer(gateway.http, COMPLETIONS, **BODY)
    chunks(gateway.http, COMPLETIONS, **BODY)
    complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))
    found, requests, tokens = scrape(gateway), 3, 3 * len(TOKENS)
    assert found.total("vllm:request_success_total", finished_reason="length") == requests
    assert found.total("vllm:request_success_total") == requests
    assert found.total("vllm:prompt_tokens_total") == requests * len(PROMPT)
    assert found.total("vllm:prefix_cache_queries_total") == requests * len(PROMPT)
    assert found.total("vllm:generation_tokens_total") == tokens
    assert found.total("vllm:time_to_first_token_seconds_count") == requests
    assert found.total("vllm:inter_token_latency_seconds_count") == tokens - requests
    assert found.total("vllm:time_per_output_token_seconds_count") == tokens - requests
    assert found.total("vllm:request_generation_tokens_sum") == tokens
    assert found.total("vllm:request_params_max_tokens_sum") == tokens
    assert found.total("tandem:reservations_total") == found.total("tandem:pushes_total") == requests
    assert found.total("tandem:rejected_total") == found.total("tandem:replays_total") == 0
    phases = sum(found.total(f"vllm:request_{phase}_time_seconds_sum") for phase in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(found.total("vllm:e2e_request_latency_seconds_sum"), rel=0.1, abs=0.005)
    assert found.total("tandem:requests") == 0


def test_requests_count_where_they_are(model: Path) -> None:
    with open_gateway(model, alone=True) as gateway, Client(gateway.grpc) as client:
        updates = client.generate(PROMPT, max_tokens=len(TOKENS), request_id="waits")
        # The call begins with its first message, which only comes once there is an island.
        reader = threading.Thread(target=list, args=(updates,))
        reader.start()
        until(lambda: scraped(gateway).total("tandem:requests", stage="queued") == 1)
        found = scraped(gateway)
        assert found.total("vllm:num_requests_waiting") == 1
        assert found.total("vllm:num_requests_running") == 0
        assert found.total("tandem:queued_tokens") == len(PROMPT) + len(TOKENS)
        assert found.total("tandem:ready") == 0
        gateway.island_comes()
        reader.join()
        until(lambda: scraped(gateway).total("tandem:requests") == 0)
        assert scraped(gateway).total("tandem:ready") == 1


def test_errors_count_by_frontend_and_status(gateway: OpenGateway) -> None:
    with pytest.raises(InvalidRequest):
        complete(gateway.grpc, PROMPT, max_tokens=1 << 20)
    assert post(gateway.http, COMPLETIONS, {**BODY, "max_tokens": 1 << 20}).status_code == 400
    assert get(gateway.http, "/nothing").status_code == 404
    found = scrape(gateway)
    assert found.total("tandem:rejected_total", frontend="grpc", code="INVALID_ARGUMENT") == 1
    assert found.total("tandem:rejected_total", frontend="http", code="400") == 1
    assert found.total("tandem:rejected_total", frontend="http", code="404") == 1
    assert found.total("tandem:rejected_total") == 3
    assert found.total("vllm:request_success_total") == 0, "they were never valid"


def failing(updates: Iterator[GenerateUpdate]) -> None:
    with pytest.raises(CallError):
        list(updates)


def test_calls_beyond_the_limit_count(model: Path) -> None:
    with open_gateway(model, {"gateway.max_calls": 1}, {"RemoteSend": ["hang"]}) as gateway:
        with Client(gateway.grpc) as client:
            call = client.generate(PROMPT, max_tokens=2)
            reader = threading.Thread(target=failing, args=(call,), daemon=True)
            reader.start()
            until(lambda: gateway.running == 1)
            assert post(gateway.http, COMPLETIONS, BODY).status_code == 429
            found = scrape(gateway)  # which the limit does not hold back
            assert found.total("tandem:rejected_total", frontend="http", code="429") == 1
            assert found.total("tandem:requests", stage="prefill") == 1
        reader.join()
        until(lambda: scraped(gateway).total("vllm:request_success_total", finished_reason="abort") == 1)
        assert scraped(gateway).total("tandem:requests") == 0


def test_lost_placements_and_failed_requests_count(model: Path) -> None:
    fails = {"RemoteSend": ["UNAVAILABLE", "INTERNAL", "INTERNAL"]}
    with open_gateway(model, fails=fails) as gateway:
        with pytest.raises(ServerError):
            complete(gateway.grpc, PROMPT, max_tokens=2)
        found = scrape(gateway)
        assert found.total("tandem:replays_total", reason="lost") == 1
        assert found.total("tandem:replays_total", reason="failed") == 1
        assert found.total("tandem:reservations_total") == 3
        assert found.total("vllm:request_success_total", finished_reason="error") == 1
        assert found.total("vllm:e2e_request_latency_seconds_count") == 0


def test_the_same_text_comes_over_grpc(gateway: OpenGateway) -> None:
    complete(gateway.grpc, PROMPT, max_tokens=len(TOKENS))
    with Client(gateway.grpc) as client:
        assert Samples(client.metrics().text).names == scrape(gateway).names


def test_metrics_that_are_off_are_nowhere(model: Path) -> None:
    with open_gateway(model, {"metrics.enabled": False}) as gateway:
        assert get(gateway.http, "/metrics").status_code == 404
        with Client(gateway.grpc) as client, pytest.raises(InvalidRequest, match=r"metrics\.enabled is false"):
            client.metrics()
        answer(gateway.http, COMPLETIONS, **BODY)
