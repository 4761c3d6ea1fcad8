"""Processes that die, stop and hang, one at a time, in a cluster of two islands: real processes, without Ray."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import WorkerLost
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.http_client import COMPLETIONS, chunks, events, streaming
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

VOCABULARY = 512
NUM_TOKENS = 400
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}  # replays must draw the same numbers
OVERRIDES: dict[str, Any] = {
    "num_islands": 2,
    "island.threads_per_worker": 1,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.http_port": 0,
    "gateway.max_attempts": 20,
    "cache.num_pages": 128,
    "recovery.max_restarts": 100,
    "recovery.drain_seconds": 60.0,
}


@dataclass(frozen=True)
class Case:
    """A request that takes long enough for a disturbance, and its undisturbed result."""

    prompt: list[int]
    tokens: list[int]
    text: str


class StillbornProcesses(LocalProcesses):
    """Processes in which the decode worker of the second epoch is stopped before it has done anything."""

    def _start(self, specs: Sequence[ActorSpec]) -> list[ForkedActor]:
        started = super()._start(specs)
        for actor in started:
            if ".2/decode" in actor.name:
                os.kill(actor.pid, signal.SIGSTOP)
        return started


@pytest.fixture(scope="module")
def processes() -> LocalProcesses:
    return LocalProcesses(STEADY)


@pytest.fixture(scope="module")
def served(small_model: Path, processes: LocalProcesses) -> Iterator[str]:
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **OVERRIDES}), processes)
    yield cluster.start()
    cluster.stop()


@pytest.fixture(scope="module")
def case(served: str) -> Case:
    prompt = random_prompt(50, 1, VOCABULARY)
    updates = complete(served, prompt, max_tokens=NUM_TOKENS, **DRAWN)
    return Case(prompt, tokens_of(updates), text_of(updates))


def info(address: str) -> inference_pb2.ClusterInfo:
    with Client(address) as client:
        return client.cluster_info()


def epochs(address: str) -> list[int]:
    return [island.epoch for island in info(address).islands]


def whole(address: str) -> bool:
    """Returns whether both islands serve, and all their pages are free."""
    workers = [worker for island in info(address).islands for worker in island.workers]
    return len(workers) == 4 and all(worker.free_pages == worker.num_pages for worker in workers)


def working(address: str) -> list[inference_pb2.WorkerInfo]:
    """Returns the workers that serve a request, prefill and decode of one island, in a cluster with one request."""
    for island in info(address).islands:
        if any(worker.running or worker.waiting for worker in island.workers):
            return list(island.workers)
    return []


def disturbed(
    address: str, case: Case, disturb: Callable[[], None], sampling: dict[str, Any] = DRAWN, behind: int = 3
) -> list[GenerateUpdate]:
    """Runs a request, and disturbs it once so many messages have come."""
    updates = []
    with Client(address) as client:
        for update in client.generate(case.prompt, timeout=100, max_tokens=len(case.tokens), **sampling):
            updates.append(update)
            if len(updates) == behind:
                disturb()
    return updates


def disturbed_over_http(address: str, case: Case, disturb: Callable[[], None]) -> list[dict[str, Any]]:
    """Does the same through the HTTP server: returns the choices of its events."""
    choices = []
    body = {"prompt": case.prompt, "max_tokens": len(case.tokens), "return_token_ids": True, **DRAWN}
    with streaming(info(address).http_address, COMPLETIONS, **body) as lines:
        for event in events(lines):
            choices += event["choices"]
            if len(choices) == 3:
                disturb()
    return choices


def attempts(updates: list[GenerateUpdate]) -> int:
    assert updates[-1].timings is not None
    return updates[-1].timings.attempts


@pytest.mark.gate("1-3")
@pytest.mark.parametrize(("pe", "behind"), [(0, 1), (1, 3)])
def test_a_worker_dies_while_log_probabilities_of_the_prompt_come(served: str, pe: int, behind: int) -> None:
    """The prefill worker dies while it computes them, the decode worker while a client has not read them."""
    until(lambda: whole(served))
    sampling = {**DRAWN, "prompt_logprobs": 20}
    prompt = random_prompt(1200, 2, VOCABULARY)
    undisturbed = complete(served, prompt, max_tokens=NUM_TOKENS, **sampling)
    case = Case(prompt, tokens_of(undisturbed), text_of(undisturbed))
    updates = disturbed(served, case, lambda: os.kill(working(served)[pe].pid, signal.SIGKILL), sampling, behind)
    entries, expected = (
        [entry for update in one for entry in update.prompt_logprobs] for one in (updates, undisturbed)
    )
    assert entries[0] is expected[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
    values, wanted = ([entry.logprob for entry in one if entry] for one in (entries, expected))
    assert values == pytest.approx(wanted, abs=1e-4)
    assert tokens_of(updates) == case.tokens
    assert attempts(updates) == 2


def test_a_decode_worker_dies_and_the_stream_goes_on(served: str, case: Case) -> None:
    until(lambda: whole(served))
    before = epochs(served)
    updates = disturbed(served, case, lambda: os.kill(working(served)[1].pid, signal.SIGKILL))
    assert tokens_of(updates) == case.tokens
    assert attempts(updates) == 2
    until(lambda: whole(served))
    assert sorted(new - old for new, old in zip(epochs(served), before, strict=True)) == [0, 1]


def test_penalties_go_on_as_they_were_when_a_decode_worker_dies(served: str, case: Case) -> None:
    until(lambda: whole(served))
    sampling = {**DRAWN, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 300, "stop_token_ids": [7]}
    tokens = tokens_of(complete(served, case.prompt, max_tokens=NUM_TOKENS, **sampling))
    updates = disturbed(served, case, lambda: os.kill(working(served)[1].pid, signal.SIGKILL), sampling)
    assert tokens_of(updates) == tokens != case.tokens
    assert attempts(updates) == 2
    until(lambda: whole(served))


def test_a_prefill_worker_dies_and_what_decodes_is_not_disturbed(served: str, case: Case) -> None:
    until(lambda: whole(served))
    before = sum(epochs(served))
    updates = disturbed(served, case, lambda: os.kill(working(served)[0].pid, signal.SIGKILL))
    assert tokens_of(updates) == case.tokens
    assert attempts(updates) == 1
    until(lambda: sum(epochs(served)) == before + 1 and whole(served))


@pytest.mark.parametrize("lost", [0, 1], ids=["prefill", "decode"])
def test_a_worker_dies_under_an_http_stream(served: str, case: Case, lost: int) -> None:
    until(lambda: whole(served))
    before = sum(epochs(served))
    choices = disturbed_over_http(served, case, lambda: os.kill(working(served)[lost].pid, signal.SIGKILL))
    assert [token for choice in choices for token in choice["token_ids"]] == case.tokens
    assert "".join(choice["text"] for choice in choices) == case.text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    until(lambda: sum(epochs(served)) == before + 1 and whole(served))


def twenty_by_grpc(address: str, case: Case) -> list[int]:
    updates = complete(address, case.prompt, max_tokens=20, **DRAWN)
    assert attempts(updates) == 2
    return tokens_of(updates)


def twenty_by_http(address: str, case: Case) -> list[int]:
    body = {"prompt": case.prompt, "max_tokens": 20, "return_token_ids": True, **DRAWN}
    found = chunks(address, COMPLETIONS, **body)
    return [token for chunk in found for token in chunk["choices"][0]["token_ids"]]


@pytest.mark.gate("grpc")
@pytest.mark.parametrize("twenty", [twenty_by_grpc, twenty_by_http], ids=["grpc", "http"])
def test_a_prefill_worker_dies_before_the_first_token(
    served: str, case: Case, processes: LocalProcesses, twenty: Callable[[str, Case], list[int]]
) -> None:
    until(lambda: whole(served))
    address = served if twenty is twenty_by_grpc else info(served).http_address
    stopped = [pid for name, pid in processes.pids.items() if "/prefill" in name]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(twenty, address, case)
        try:
            decodes: dict[int, str] = {}
            until(lambda: decodes.update(_waiting(served)) or decodes)
            (island,) = decodes.values()
            (lost,) = [pid for name, pid in processes.pids.items() if f"/{island}." in name and "/prefill" in name]
            os.kill(lost, signal.SIGKILL)
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert answer.result(100) == case.tokens[:20]
    until(lambda: whole(served))


def _waiting(address: str) -> dict[int, str]:
    islands = info(address).islands
    return {worker.pe: island.name for island in islands for worker in island.workers if worker.waiting}


def test_the_gateway_dies_and_the_client_goes_on(served: str, case: Case, processes: LocalProcesses) -> None:
    until(lambda: whole(served))
    before = info(served)

    def kill() -> None:
        (pid,) = [pid for name, pid in processes.pids.items() if "gateway" in name]
        os.kill(pid, signal.SIGKILL)

    updates = disturbed(served, case, kill)
    assert tokens_of(updates) == case.tokens
    last = updates[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.output_tokens) == (50, NUM_TOKENS)
    assert info(served).gateway_restarts == before.gateway_restarts + 1
    assert epochs(served) == [island.epoch for island in before.islands]
    until(lambda: whole(served))


@pytest.mark.gate("decode")
@pytest.mark.parametrize("lost", ["decode", "gateway"])
def test_a_process_dies_under_several_answers(served: str, case: Case, processes: LocalProcesses, lost: str) -> None:
    until(lambda: whole(served))
    seeds = [DRAWN["seed"] + index for index in range(3)]
    expected = [tokens_of(complete(served, case.prompt, max_tokens=200, **DRAWN | {"seed": seed})) for seed in seeds]
    tokens: list[list[int]] = [[], [], []]
    killed, usage = False, None
    with Client(served) as client:
        for update in client.generate(case.prompt, n=3, timeout=100, max_tokens=200, **DRAWN):
            tokens[update.index] += update.token_ids
            usage = update.usage
            if not killed and all(len(one) > 2 for one in tokens):
                (gateway,) = [pid for name, pid in processes.pids.items() if "gateway" in name]
                os.kill(working(served)[1].pid if lost == "decode" else gateway, signal.SIGKILL)
                killed = True
    assert killed
    assert tokens == expected
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (50, 600)
    until(lambda: whole(served))


@pytest.mark.long
def test_a_worker_that_is_stopped_for_a_while_is_slow_and_not_dead(served: str, case: Case) -> None:
    until(lambda: whole(served))
    before = epochs(served)

    def stop() -> None:
        pid = working(served)[1].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)

    updates = disturbed(served, case, stop)
    assert tokens_of(updates) == case.tokens
    assert attempts(updates) == 1
    assert epochs(served) == before


def test_a_worker_that_hangs_is_ended_and_restarts_are_bounded(small_model: Path, case: Case) -> None:
    overrides = {**OVERRIDES, "num_islands": 1, "recovery.unresponsive_seconds": 2.0, "recovery.max_restarts": 1}
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **overrides}), LocalProcesses(STEADY))
    address = cluster.start()
    try:
        updates = disturbed(address, case, lambda: os.kill(working(address)[1].pid, signal.SIGSTOP))
        assert tokens_of(updates) == case.tokens
        assert attempts(updates) == 2
        (island,) = info(address).islands
        assert (island.epoch, island.restarts) == (2, 1)
        os.kill(island.workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"prefill \(PE 0\).*recovery.max_restarts"):
            cluster.wait()
    finally:
        cluster.stop()


@pytest.mark.long
def test_a_worker_that_hangs_from_the_beginning_is_ended(small_model: Path, case: Case) -> None:
    overrides = {**OVERRIDES, "num_islands": 1, "recovery.unresponsive_seconds": 2.0}
    processes = StillbornProcesses(STEADY)
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **overrides}), processes)
    address = cluster.start()
    try:
        updates = disturbed(address, case, lambda: os.kill(working(address)[1].pid, signal.SIGKILL))
        assert tokens_of(updates) == case.tokens
        (island,) = info(address).islands
        assert (island.epoch, island.restarts) == (3, 3)  # of epoch 2 it was replaced alone, then all were
    finally:
        cluster.stop()
