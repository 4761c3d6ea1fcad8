"""`tandem scale` through the gateway's gRPC server: processes stay, weights are not read again, no token is lost."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.cluster.cli.commands import main
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import InvalidRequest, ScaleRefused, ServerError
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.e2e.test_recovery import Case, disturbed, info
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

WEIGHTS = "model.safetensors"
OVERRIDES: dict[str, Any] = {
    "name": "c",
    "num_islands": 2,
    "island.threads_per_worker": 1,
    "gateway.port": 0,
    "cache.num_pages": 128,
    "recovery.drain_seconds": 0.0,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a checkpoint for this file alone, for its weights are taken away now and then."""
    folder = tmp_path_factory.mktemp("scale") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder


@pytest.fixture(scope="module")
def case(checkpoint: Path) -> Case:
    prompt = random_prompt(50, 1, 512)
    return Case(prompt, greedy(load_oracle(checkpoint), prompt, 400), text="")  # no test here looks at it


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[str]:
    cluster = Cluster(load_config(None, {"model.path": str(checkpoint), **OVERRIDES}), LocalProcesses(STEADY))
    yield cluster.start()
    cluster.stop()


def workers(address: str, island: str) -> list[tuple[inference_pb2.Role, int]]:
    """Returns (role, pid) of each PE, once they all answer in time: a silent one has no pid."""
    found: list[inference_pb2.WorkerInfo] = []

    def all_answer() -> bool:
        (found[:],) = [each.workers for each in info(address).islands if each.name == island]
        return all(worker.alive for worker in found)

    until(all_answer)
    return [(worker.role, worker.pid) for worker in found]


def tandem(*arguments: str) -> int:
    """Runs the command, and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def segments(pid: int) -> int:
    """Returns the number of PEs whose pages the process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "memfd:tandem-pages" in line})


P, D = inference_pb2.ROLE_PREFILL, inference_pb2.ROLE_DECODE


def test_roles_change_and_the_weights_stay(
    served: str, checkpoint: Path, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    other = info(served).islands[1]
    (_, first), (_, second) = workers(served, "c-0")
    with Client(served) as client:
        done = client.scale("c-0", num_decode=2)
        assert (done.epoch, done.num_prefill, done.num_decode, done.kept, done.started) == (2, 1, 2, 2, 1)
        (_, _), (_, _), (_, third) = grown = workers(served, "c-0")
        assert grown == [(P, first), (D, second), (D, third)]
        (checkpoint / WEIGHTS).rename(checkpoint / "taken away")
        try:
            done = client.scale("c-0", num_prefill=2, num_decode=1)
            assert (done.epoch, done.kept, done.started, done.ended) == (3, 3, 0, 0)
            assert workers(served, "c-0") == [(P, first), (P, third), (D, second)]
            assert [psutil.Process(pid).name() for pid in (third, second)] == ["prefill (PE 1)", "decode (PE 2)"]
            with pytest.raises(ScaleRefused, match=WEIGHTS):
                client.scale("c-0", num_prefill=3)
        finally:
            (checkpoint / "taken away").rename(checkpoint / WEIGHTS)
        assert tokens_of(complete(served, case.prompt, max_tokens=50, **GREEDY)) == case.tokens[:50]
    assert tandem("scale", "--island", "c-0", "--prefill", "1", "--address", served) == 0
    line = capsys.readouterr().out
    assert line.startswith("c-0: epoch 5, 1 prefill and 1 decode workers; 2 kept, 0 started, 1 ended; away for ")
    until(lambda: not psutil.pid_exists(third))
    assert [segments(first), segments(second)] == [2, 2]
    assert info(served).islands[1].epoch == other.epoch
    assert {island.host for island in info(served).islands} == {other.host} != {""}


def test_a_request_goes_on_through_the_change(served: str, case: Case) -> None:
    """Its island is given no time to finish it, and processes change their roles."""
    with Client(served) as client:
        for island in ("c-0", "c-1"):
            client.scale(island, num_decode=2)

        def shrink() -> None:
            (island,) = [each.name for each in info(served).islands if any(worker.running for worker in each.workers)]
            assert client.scale(island, num_prefill=2, num_decode=1).kept == 3

        updates = disturbed(served, case, shrink, GREEDY)
        assert tokens_of(updates) == case.tokens
        assert updates[-1].timings is not None
        assert updates[-1].timings.attempts == 2
        for island in ("c-0", "c-1"):
            client.scale(island, num_prefill=1, num_decode=1)
    until(lambda: all(worker.free_pages == worker.num_pages for i in info(served).islands for worker in i.workers))


def test_refusals_name_what_is_wrong(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(served) as client:
        for wrong, message in [
            ({"num_prefill": 0}, "num_prefill is 0; it must be from 1 to 256, or 0 where scheduler.roles is adaptive"),
            ({"num_decode": 257}, "num_decode is 257"),
            ({}, "give one or both"),
            ({"num_prefill": 1}, "island is ''; it must be one of c-0, c-1"),
        ]:
            with pytest.raises(InvalidRequest, match=message):
                client.scale(**wrong)
    assert tandem("scale", "--prefill", "2", "--island", "x", "--address", served) == 2
    assert "island is 'x'; it must be one of c-0, c-1" in capsys.readouterr().err


@pytest.mark.long
def test_a_worker_that_dies_meanwhile_brings_the_old_shape_back(served: str, case: Case) -> None:
    """The worker hangs, so that the change waits for it, and then it is killed."""
    ((_, first), (_, second)) = workers(served, "c-0")
    os.kill(second, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool, Client(served) as client:
        scaled = pool.submit(client.scale, "c-0", num_prefill=2, num_decode=1)
        until(lambda: not info(served).islands[0].workers)  # no requests any more
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ServerError, match="keeps its shape"):
            scaled.result(60)
    until(lambda: [role for role, _ in workers(served, "c-0")] == [P, D])
    assert not psutil.pid_exists(first)
    assert tokens_of(complete(served, case.prompt, max_tokens=50, **GREEDY)) == case.tokens[:50]


def test_an_island_of_one_worker_gets_another_and_gives_it_up(checkpoint: Path, case: Case) -> None:
    """It takes requests again after its only worker was lost."""
    settings = {"model.path": str(checkpoint), **OVERRIDES, "num_islands": 1, "island.num_prefill": 0}
    cluster = Cluster(load_config(None, settings | {"scheduler.roles": "colocated"}), LocalProcesses(STEADY))
    address = cluster.start()
    try:
        for shape in ([D], [P, D], [D]):
            if len(shape) != len(workers(address, "c")):
                assert tandem("scale", "--prefill", str(len(shape) - 1), "--address", address) == 0
            assert [role for role, _ in workers(address, "c")] == shape
            assert tokens_of(complete(address, case.prompt, max_tokens=20, **GREEDY)) == case.tokens[:20]
        ((_, alone),) = workers(address, "c")
        updates = disturbed(address, case, lambda: os.kill(alone, signal.SIGKILL), GREEDY)
        assert tokens_of(updates) == case.tokens
        with (
            Client(address) as client,
            pytest.raises(InvalidRequest, match="num_decode is 0; it must be from 1 to 256"),
        ):
            client.scale(num_decode=0)
    finally:
        cluster.stop()
