"""A cluster under Ray: every worker is a process, and every call goes through gRPC."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import CallError, ScaleRefused, StartFailed
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.support.client_requests import GREEDY, complete, complete_all, text_of, tokens_of
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt

VOCABULARY = 512


@pytest.fixture(scope="module")
def terminations() -> Iterator[list[int]]:
    """Records the SIGTERMs that have come."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def cluster(small_model: Path, terminations: list[int]) -> Iterator[Cluster]:
    """Runs a cluster of two decode and two prefill processes."""
    overrides = {
        "name": f"test-{os.getpid()}",
        "model.path": str(small_model),
        "gateway.port": 0,
        "island.num_prefill": 2,
        "island.num_decode": 2,
        "island.threads_per_worker": 1,
        "cache.num_pages": 192,
        "scheduler.max_batch_tokens": 64,
        "ray.num_cpus": 2,
    }
    cluster = Cluster(load_config(None, overrides))
    cluster.start()
    yield cluster
    cluster.stop()


def workers(address: str) -> list[inference_pb2.WorkerInfo]:
    with Client(address) as client:
        return list(client.cluster_info().islands[0].workers)


def assert_idle(address: str, seconds: float = 10.0) -> list[inference_pb2.WorkerInfo]:
    """Checks that every page of every worker is free, and nothing runs, waits or drains, within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        infos = workers(address)
        busy = [
            info
            for info in infos
            if info.free_pages != info.num_pages or info.draining_pages or info.running or info.waiting
        ]
        if not busy:
            return infos
        assert time.monotonic() < deadline, f"not idle after {seconds} s: {busy}"
        time.sleep(0.05)


def test_tokens_equal_transformers_across_processes(cluster: Cluster, small_model: Path) -> None:
    prompts = [random_prompt(length, length, VOCABULARY) for length in (1, 15, 16, 17, 63, 64, 65, 200) * 2]
    expected = greedy_all(load_oracle(small_model), prompts, 10)
    assert complete_all(cluster.grpc_address, prompts, max_tokens=10, **GREEDY) == expected
    pids = {info.pid for info in assert_idle(cluster.grpc_address)}
    assert len(pids) == 4
    assert os.getpid() not in pids


@pytest.mark.long
def test_a_worker_more_and_one_less(cluster: Cluster) -> None:
    """Ray's resources of the worker that left are free again; a worker without room is refused."""
    before = workers(cluster.grpc_address)
    free = ray.available_resources()["CPU"]
    with Client(cluster.grpc_address) as client:
        with pytest.raises(ScaleRefused, match=r"9.8 CPUs are needed; Ray has 2 CPUs"):
            client.scale(num_prefill=100)
        assert client.scale(num_decode=3).started == 1
        assert len(workers(cluster.grpc_address)) == 5
        assert ray.available_resources()["CPU"] == pytest.approx(free - 0.1)
        assert client.scale(num_decode=2).ended == 1
    assert [info.pid for info in workers(cluster.grpc_address)] == [info.pid for info in before]
    deadline = time.monotonic() + 30
    while ray.available_resources()["CPU"] != pytest.approx(free):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_signals_are_whose_they_were(cluster: Cluster, terminations: list[int]) -> None:
    """`tandem up` stops in order at SIGTERM, also while it starts. Ray would abort the process."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert terminations == [signal.SIGTERM]


def test_what_only_a_worker_finds_wrong(
    cluster: Cluster, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher reports it. The second cluster is on the Ray of the first."""
    monkeypatch.setattr("tandem.cluster.supervision.islands.checkpoint.check_weights", lambda *_: None)
    (tmp_path / "config.json").write_bytes((small_model / "config.json").read_bytes())
    overrides = {"name": f"no-weights-{os.getpid()}", "model.path": str(tmp_path), "gateway.port": 0}
    with pytest.raises(StartFailed, match=r"has no weights; it must have model\.safetensors"):
        Cluster(load_config(None, overrides)).start()
    assert len(assert_idle(cluster.grpc_address)) == 4


def test_workers_run_at_the_priority_of_their_launcher(cluster: Cluster) -> None:
    """They do not run at Ray's nice 15, where any other process of the machine goes first."""
    priorities = {os.getpriority(os.PRIO_PROCESS, info.pid) for info in workers(cluster.grpc_address)}
    assert priorities == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_text_in_text_out(cluster: Cluster) -> None:
    updates = complete(cluster.grpc_address, "The cache keeps keys", max_tokens=12, temperature=0)
    assert text_of(updates)
    last = updates[-1]
    assert last.finish_reason in ("length", "stop")
    assert last.usage is not None
    assert last.timings is not None
    assert last.usage.output_tokens == len(tokens_of(updates))
    assert 0 < last.timings.queue_seconds < last.timings.first_token_seconds < last.timings.total_seconds
    assert last.timings.bytes_pushed > 0
    assert all(update.usage is None for update in updates[:-1])


def test_health_and_reflection(cluster: Cluster) -> None:
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(  # type: ignore[attr-defined]  # stubs without types
            health_pb2.HealthCheckRequest(service="tandem.v1.Inference"), timeout=5
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = stub.ServerReflectionInfo(  # type: ignore[operator]
            iter([request]), timeout=5
        )
        assert "tandem.v1.Inference" in {service.name for service in listed.list_services_response.service}


def test_model_info(cluster: Cluster) -> None:
    with Client(cluster.grpc_address) as client:
        info = client.model_info()
    assert (info.architecture, info.dtype, info.vocab_size) == ("LlamaForCausalLM", "float32", VOCABULARY)
    assert info.has_tokenizer
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_two_hundred_requests_a_third_cancelled(cluster: Cluster, small_model: Path) -> None:
    """Pages come back after every cancel, the other requests get their tokens, and memory stays flat."""
    rng = random.Random(0)
    checked = [random_prompt(rng.randrange(1, 180), seed, VOCABULARY) for seed in range(6)]
    expected = greedy_all(load_oracle(small_model), checked, 20)

    async def one(client: AsyncClient, number: int) -> None:
        if number % 20 == 0 and number // 20 < len(checked):
            prompt, wanted = checked[number // 20], expected[number // 20]
            updates = [u async for u in client.generate(prompt, timeout=120, max_tokens=20, **GREEDY)]
            assert tokens_of(updates) == wanted
            return
        prompt = random_prompt(rng.randrange(1, 300), number, VOCABULARY)
        length = rng.randrange(1, 40)
        stream = client.generate(prompt, timeout=120, max_tokens=length, **GREEDY)
        if number % 3:
            assert len(tokens_of([update async for update in stream])) == length
            return
        task = asyncio.ensure_future(anext(stream))
        await asyncio.wait([task], timeout=rng.choice([0, 0.002, 0.01, 0.05, 0.3, 1.0]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def every() -> None:
        async with AsyncClient(cluster.grpc_address) as client:
            await asyncio.gather(*(one(client, number) for number in range(200)))

    asyncio.run(every())  # once to have allocated what such a storm takes at its height
    before = {info.pe: info.resident_bytes for info in assert_idle(cluster.grpc_address)}
    asyncio.run(every())
    after = assert_idle(cluster.grpc_address)
    for info in after:
        grown = info.resident_bytes - before[info.pe]
        assert grown < 32 << 20, f"PE {info.pe} grew by {grown >> 20} MiB"


def test_bad_requests_leave_the_others_alone(cluster: Cluster, small_model: Path) -> None:
    prompt = random_prompt(30, 5, VOCABULARY)
    expected = greedy(load_oracle(small_model), prompt, 30)

    async def good(client: AsyncClient) -> list[int]:
        return tokens_of([u async for u in client.generate(prompt, timeout=60, max_tokens=30, **GREEDY)])

    async def bad(client: AsyncClient) -> None:
        with pytest.raises(CallError):
            async for _ in client.generate([VOCABULARY], timeout=60):
                pass

    async def both() -> list[list[int]]:
        async with AsyncClient(cluster.grpc_address) as client:
            results = await asyncio.gather(*(good(client) for _ in range(4)), *(bad(client) for _ in range(8)))
        return [tokens for tokens in results if tokens is not None]

    assert asyncio.run(both()) == [expected] * 4
