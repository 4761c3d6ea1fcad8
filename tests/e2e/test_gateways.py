"""A gateway of two processes on the same ports: either answers, and nothing is lost between them."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import Overloaded, Unavailable
from tandem.cluster.protocol import build_request
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.e2e.test_recovery import DRAWN, Case, disturbed, info
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

NUM_TOKENS = 400
MAX_CALLS = 6
OVERRIDES: dict[str, Any] = {
    "island.threads_per_worker": 1,
    "gateway.processes": 2,
    "gateway.port": 0,
    "gateway.http_port": 0,
    "gateway.max_calls": MAX_CALLS,
    "cache.num_pages": 256,
    "recovery.max_restarts": 100,
}


@pytest.fixture(scope="module")
def processes() -> LocalProcesses:
    return LocalProcesses(STEADY)


@pytest.fixture(scope="module")
def cluster(small_model: Path, processes: LocalProcesses) -> Iterator[Cluster]:
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **OVERRIDES}), processes)
    cluster.start()
    addresses = [cluster.grpc_address, cluster.http_address or ""]
    yield cluster
    cluster.stop()
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket.create_server((host, int(port))).close()  # nobody holds it any more


@pytest.fixture
def served(cluster: Cluster) -> str:
    until(lambda: calm(cluster.grpc_address))
    return cluster.grpc_address


@pytest.fixture(scope="module")
def case(cluster: Cluster) -> Case:
    prompt = random_prompt(50, 1, 512)
    updates = complete(cluster.grpc_address, prompt, max_tokens=NUM_TOKENS, **DRAWN)
    return Case(prompt, tokens_of(updates), text_of(updates))


def calm(address: str) -> bool:
    """Returns whether both processes serve and do nothing, and all pages are free."""
    now = info(address)
    workers = [worker for island in now.islands for worker in island.workers]
    free = len(workers) == 2 and all(worker.free_pages == worker.num_pages for worker in workers)
    return free and all(gateway.pid for gateway in now.gateways) and now.active == now.queued == 0


def calm_without(address: str, pid: int) -> bool:
    """Returns calm() once the process with that pid is known to be gone. It may take the connection with it."""
    try:
        return pid_of(address, 0) != pid and calm(address)
    except Unavailable:
        return False


def answering(channel: grpc.Channel) -> int:
    """Returns the number of the process that answers on a connection, if no other call is under way.

    A call counts for a moment after its answer. So this asks until its own call is the only one.
    """
    stub = inference_pb2_grpc.InferenceStub(channel)
    while True:
        calls = [gateway.calls for gateway in stub.GetClusterInfo(inference_pb2.GetClusterInfoRequest()).gateways]
        if sum(calls) == 1:
            return calls.index(1)


@contextmanager
def connected(address: str) -> Iterator[list[grpc.Channel]]:
    """Yields a connection to each process. The kernel chooses a process for each connection, so it may take several
    tries."""
    channels: dict[int, grpc.Channel] = {}
    spare: list[grpc.Channel] = []
    while len(channels) < 2:
        channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        kept = channels.setdefault(answering(channel), channel)
        if kept is not channel:
            spare.append(channel)
    try:
        yield [channels[0], channels[1]]
    finally:
        for channel in (*spare, *channels.values()):
            channel.close()


@pytest.fixture
def stubs(served: str) -> Iterator[list[Any]]:
    """Yields the stubs of process 0 and of process 1."""
    with connected(served) as channels:
        yield [inference_pb2_grpc.InferenceStub(channel) for channel in channels]


def request(
    case: Case, request_id: str, received: int | None = None, max_tokens: int = NUM_TOKENS
) -> inference_pb2.GenerateRequest:
    message = build_request(case.prompt, {**DRAWN, "max_tokens": max_tokens}, request_id)
    if received is not None:
        message.resume.CopyFrom(inference_pb2.Resume(token_ids=case.tokens[:received]))
    return message


def some(call: Any, messages: int = 3) -> list[int]:
    return [token for _ in range(messages) for token in next(call).token_ids]


def rest(call: Any) -> list[int]:
    return [token for message in call for token in message.token_ids]


def pid_of(address: str, process: int) -> int:
    return info(address).gateways[process].pid


def test_both_processes_answer_through_both_frontends(cluster: Cluster, served: str, case: Case) -> None:
    seen: set[int] = set()
    body = {"prompt": case.prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with connected(served) as channels:
        assert [answering(channel) for channel in channels] == [0, 1]
        ask = inference_pb2_grpc.InferenceStub(channels[0]).GetClusterInfo
        for _ in range(100):  # the kernel chooses at random
            url = f"http://{cluster.http_address}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
                chunks = answer.iter_bytes()  # the answer is closed when this is gone
                next(chunks)
                now = ask(inference_pb2.GetClusterInfoRequest())
                active = [gateway.active for gateway in now.gateways]
                assert now.active == sum(active) == 1
                seen |= {active.index(1)}
            until(lambda: not ask(inference_pb2.GetClusterInfoRequest()).active)
            if len(seen) == 2:
                return
    pytest.fail(f"only process {seen} answered")


@pytest.mark.gate("0")
@pytest.mark.parametrize("old", [0, 1])
def test_a_resume_takes_over_from_another_process(stubs: list[Any], case: Case, old: int) -> None:
    first = stubs[old].Generate(request(case, "mine"), timeout=60)
    received = some(first)
    second = stubs[1 - old].Generate(request(case, "mine", len(received)), timeout=60)
    assert received + rest(second) == case.tokens
    with pytest.raises(grpc.RpcError, match="taken request_id 'mine' over") as caught:
        rest(first)
    assert caught.value.code() == grpc.StatusCode.ABORTED  # type: ignore[attr-defined]


def test_an_id_that_another_process_runs_is_refused(stubs: list[Any], case: Case) -> None:
    first = stubs[0].Generate(request(case, "mine"), timeout=60)
    received = some(first)
    for stub in reversed(stubs):
        with pytest.raises(grpc.RpcError, match="'mine' is in use by a request that still runs") as caught:
            rest(stub.Generate(request(case, "mine"), timeout=60))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert received + rest(first) == case.tokens
    assert rest(stubs[1].Generate(request(case, "mine"), timeout=60)) == case.tokens


@pytest.mark.long
def test_of_calls_of_one_id_that_come_at_once_one_runs(stubs: list[Any], case: Case) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(3):
            begin = threading.Barrier(4)

            def one(which: int, begin: threading.Barrier = begin, number: int = number) -> str:
                begin.wait()
                try:
                    return str(rest(stubs[which % 2].Generate(request(case, f"at once {number}"), timeout=60)))
                except grpc.RpcError as error:
                    return str(error.details())  # type: ignore[attr-defined]

            answers = list(pool.map(one, range(4)))
            assert answers.count(str(case.tokens)) == 1
            assert sum("is in use" in answer for answer in answers) == 3


@pytest.mark.long
def test_resumes_that_come_at_once_leave_one(stubs: list[Any], case: Case) -> None:
    begin = threading.Barrier(4)

    def one(which: int) -> str:
        begin.wait()
        try:
            return str(rest(stubs[which % 2].Generate(request(case, "mine", received=5), timeout=60)))
        except grpc.RpcError as error:
            return str(error.details())  # type: ignore[attr-defined]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, range(4)))
    assert answers.count(str(case.tokens[5:])) == 1
    assert sum("a later call has taken" in answer for answer in answers) == 3


def test_a_stream_of_a_killed_process_goes_on_in_the_other(served: str, stubs: list[Any], case: Case) -> None:
    before = info(served).gateway_restarts
    beside = stubs[1].Generate(request(case, "beside"), timeout=60)
    received_beside = some(beside)
    first = stubs[0].Generate(request(case, "mine"), timeout=60)
    received = some(first)
    os.kill(pid_of(served, 0), signal.SIGKILL)
    assert received + rest(stubs[1].Generate(request(case, "mine", len(received)), timeout=60)) == case.tokens
    assert received_beside + rest(beside) == case.tokens
    with pytest.raises(grpc.RpcError):
        rest(first)
    until(lambda: calm(served))
    now = info(served)
    assert now.gateway_restarts == before + 1
    assert [gateway.restarts for gateway in now.gateways][1] == 0
    with connected(served) as channels:
        assert [answering(channel) for channel in channels] == [0, 1]


def test_tandems_client_goes_on_by_itself(served: str, case: Case) -> None:
    def kill() -> None:
        now = info(served)
        (serving,) = [gateway for gateway in now.gateways if gateway.active]
        os.kill(serving.pid, signal.SIGKILL)

    assert tokens_of(disturbed(served, case, kill)) == case.tokens


@pytest.mark.long
def test_a_process_that_is_stopped_ends_its_old_stream_when_it_goes_on(
    served: str, stubs: list[Any], case: Case
) -> None:
    """Nobody waits for it for long, and what it still sends goes to a client that has left it."""
    first = stubs[0].Generate(request(case, "mine"), timeout=60)
    received = some(first)
    pid = pid_of(served, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        second = stubs[1].Generate(request(case, "mine", len(received)), timeout=60)
        more = some(second)
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(grpc.RpcError, match="taken request_id 'mine' over"):
        rest(first)
    assert received + more + rest(second) == case.tokens


def test_the_limit_of_calls_holds_for_both_together(served: str, stubs: list[Any], case: Case) -> None:
    calls = [stubs[number % 2].Generate(request(case, f"call {number}"), timeout=60) for number in range(MAX_CALLS)]
    for call in calls:
        some(call, 1)
    for stub in stubs:
        with pytest.raises(grpc.RpcError, match=f"{MAX_CALLS} calls are under way; gateway.max_calls is {MAX_CALLS}"):
            rest(stub.Generate(request(case, "one more"), timeout=60))
    with pytest.raises(Overloaded), Client(served) as client:
        client.model_info()
    for call in calls:
        call.cancel()


@pytest.mark.long
def test_either_process_takes_scale_orders(served: str, case: Case) -> None:
    with connected(served) as channels:
        for channel in channels:
            order = admin_pb2.ScaleRequest(num_prefill=5000)
            with pytest.raises(grpc.RpcError, match="num_prefill is 5000"):
                admin_pb2_grpc.AdminStub(channel).Scale(order, timeout=60)
            answer = admin_pb2_grpc.AdminStub(channel).Scale(admin_pb2.ScaleRequest(num_decode=1), timeout=60)
            assert (answer.num_prefill, answer.num_decode, answer.started) == (1, 1, 0)
        scaled = admin_pb2_grpc.AdminStub(channels[1]).Scale(admin_pb2.ScaleRequest(num_decode=2), timeout=120)
        assert (scaled.kept, scaled.started) == (2, 1)
        for channel in channels:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert rest(stub.Generate(request(case, "after"), timeout=60)) == case.tokens
        admin_pb2_grpc.AdminStub(channels[0]).Scale(admin_pb2.ScaleRequest(num_decode=1), timeout=120)


def scraped(address: str) -> Samples:
    with Client(address) as client:
        return Samples(client.metrics().text)


def flushed(address: str) -> Samples:
    """Scrapes both processes' counts. A process that is asked counts the gaps that it has gathered."""
    with connected(address) as channels:
        texts = [admin_pb2_grpc.AdminStub(one).GetMetrics(admin_pb2.GetMetricsRequest()).text for one in channels]
    return Samples(texts[-1])


@pytest.mark.long
def test_one_scrape_counts_all_processes_and_no_count_goes_down_with_one(
    served: str, stubs: list[Any], case: Case
) -> None:
    names = ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count", "vllm:request_success_total")

    def counts() -> list[float]:
        return [scraped(served).total(name) for name in names]

    def grown(wanted: list[float]) -> bool:
        return [now - before for now, before in zip(counts(), first, strict=True)] == wanted

    begun = flushed(served)
    first = [begun.total(name) for name in names]
    for number, stub in enumerate(stubs):
        assert rest(stub.Generate(request(case, f"counted {number}"), timeout=60)) == case.tokens
    until(lambda: grown([2 * NUM_TOKENS, 2, 2]))
    lost = pid_of(served, 0)
    os.kill(lost, signal.SIGKILL)
    until(lambda: calm_without(served, lost))
    assert grown([2 * NUM_TOKENS, 2, 2])
    with connected(served) as channels:
        for number, channel in enumerate(channels):
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert rest(stub.Generate(request(case, f"counted again {number}"), timeout=60)) == case.tokens
    until(lambda: grown([4 * NUM_TOKENS, 4, 4]))
    found = scraped(served)
    assert found.total("tandem:gateway_restarts_total") >= 1
    assert found.total("tandem:gateway_processes") == 2
    assert found.total("tandem:requests") == 0
    assert found.total("tandem:worker_up") == 2
    assert found.total("tandem:worker_pushes_total") == found.total("tandem:worker_pushes_total", role="prefill") > 0
    assert found.total("tandem:worker_decoded_tokens_total", role="decode") > 0
