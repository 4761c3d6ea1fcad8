"""Tests the benchmarks' measuring on a small island: local, pushed and served mean what they claim."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.cluster.tools.demo import MODEL, PROMPTS
from tests.benchmarks import push_beside_prefill, speculation, ttft
from tests.benchmarks.pair import Pair
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    with running_island(small_model, {"cache.prefix_sharing": False, "gateway.http_port": 0}) as running:
        yield running


def test_a_prefill_without_push_computes_the_same_and_writes_one_position(island: Island, small_model: Path) -> None:
    with Pair(island.address, island.workers[0].config.token) as pair:
        prompt = pair.prompt(100)
        alone, pushed = pair.prefill(prompt, push=False), pair.prefill(prompt, push=True)
        assert alone.first_token == pushed.first_token == greedy(load_oracle(small_model), prompt, 1)[0]
        assert (alone.bytes_pushed, pushed.bytes_pushed) == (pair.token_bytes, 100 * pair.token_bytes)
        assert alone.seconds > alone.worker_seconds > 0
        assert prompt != pair.prompt(100)
    with island.client() as client:
        workers = client.cluster_info().islands[0].workers
    assert all(worker.free_pages == worker.num_pages and not worker.draining_pages for worker in workers)


def test_ttft(island: Island) -> None:
    with Pair(island.address, island.workers[0].config.token) as pair:
        numbers = ttft.measure(pair, 40, rounds=1)
    assert numbers["ttft_less_local_ms"] == pytest.approx(numbers["ttft_ms"] - numbers["local_ms"], rel=1e-3, abs=0.02)
    parts = ("gateway_less_prefill_ms", "client_ms")  # the first token may come before all has landed
    assert min(numbers["client_ms"], numbers["reservation_ms"]) > 0
    assert sum(numbers[name] for name in parts) < numbers["ttft_ms"]
    assert numbers["handoff_ms"] > numbers["ttft_less_local_ms"]
    result = ttft.result_of({"m": {1024: numbers, 8192: numbers}}, rounds=1)
    assert [target["at_most"] for target in result["targets"]] == [2.0, 1.5, 2.0, 0.01, 1.5, 2.0]


def test_push_beside_prefill(island: Island) -> None:
    with Pair(island.address, island.workers[0].config.token) as pair:
        numbers = push_beside_prefill.measure(pair, 40, rounds=1)
    assert numbers["bytes_landed"] == 40 * pair.token_bytes
    assert push_beside_prefill.result_of(numbers, 1)["targets"][0]["at_most"] == 1.01


@pytest.mark.long
def test_speculation() -> None:
    with ExitStack() as stack:
        addresses = {
            method: stack.enter_context(running_island(MODEL, speculation.settings_of(method))).address
            for method in ("none", "draft_model")
        }
        numbers = speculation.measure(addresses, rounds=1, prompts=PROMPTS[:1])
    none, drafted = numbers["none"], numbers["draft_model"]
    assert (none["drafted"], none["tokens_per_step"], none["lone_to_none"]) == (0, 1, 1)
    assert drafted["drafted"] > 0
    assert 0 < drafted["accepted"] <= 1
    assert drafted["tokens_per_step"] > 1


@pytest.mark.long
def test_serving(island: Island) -> None:
    arguments = ["--clients", "3", "2", "--requests", "5", "--prompt", "20", "--output", "6"]
    arguments += ["--frontend", "grpc", "http"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.serving", "--address", island.address, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    result = json.loads(done.stdout)
    loads = [f"{load}, {frontend}" for load in ("3 clients", "2 clients") for frontend in ("grpc", "http")]
    assert list(result["loads"]) == loads
    assert list(result["http_to_grpc"]) == loads[1::2]
    for load in result["loads"].values():
        assert load["requests"] == 5
        assert 3 * load["requests_s"] <= load["tokens_s"] <= 9 * load["requests_s"]
        assert 0 < load["ttft_p50_ms"] <= load["ttft_p99_ms"]
        assert 0 < load["tpot_p50_ms"] <= load["tpot_p99_ms"]
    assert all(len(values) == 4 for plot in result["plots"] for values in plot["series"].values())
