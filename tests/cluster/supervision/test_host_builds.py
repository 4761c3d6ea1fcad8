"""Kernels of other hosts: who is asked to compile, and who waits."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.supervision import worker_actor
from tandem.cluster.supervision.islands.host_builds import HostBuilds
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.cluster.fake_processes import FakeProcess, FakeProcesses
from tests.support.waiting import until

OTHER = "10.0.0.2"


def member(name: str, host: str) -> FakeProcess:
    process = FakeProcess(name)
    process.host = host
    process.silent.add("build")
    return process


def asked(*members: FakeProcess) -> list[int]:
    return [sum(method == "build" for method, _ in one.calls) for one in members]


def test_one_worker_of_each_other_host_is_asked_and_all_wait(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(None, {"model.path": "/model"})
    builds = HostBuilds(config, FakeProcesses())
    here, first, second, third = (
        member("a", "127.0.0.1"),
        member("b", OTHER),
        member("c", OTHER),
        member("d", "10.0.0.3"),
    )
    waits = builds.begin([here, first, third])
    assert (asked(here, first, third), len(waits)) == ([0, 1, 1], 2)
    (wait,) = builds.begin([second])
    assert wait in waits
    assert asked(second) == [0]
    (order,) = next(arguments for method, arguments in first.calls if method == "build")
    assert ClusterConfig.model_validate_json(cast(str, order)) == config
    first.answer_pending("build", ["k: nvcc is not on the PATH"])
    assert wait.result(0) is None
    assert f"not built ahead on {OTHER}: k: nvcc is not on the PATH" in caplog.text
    assert builds.begin([second])[0].done()
    assert asked(second) == [0]


def test_a_worker_that_ends_leaves_it_to_the_next_one_of_its_host() -> None:
    builds = HostBuilds(load_config(None, {}), FakeProcesses())
    first, second = member("a", OTHER), member("b", OTHER)
    (wait,) = builds.begin([first])
    first.kill()
    assert wait.result(0) is None
    (again,) = builds.begin([second])
    assert (again.done(), asked(second)) == (False, [1])


class TwoHosts(FakeProcesses):
    """Workers are on the other one."""

    def _start(self, specs: Any) -> list[FakeProcess]:
        members = super()._start(specs)
        for one in members:
            if "/gateway." not in one.name:
                one.host = OTHER
                one.silent.add("build")
        return members


def test_no_forward_comes_before_the_kernels_of_its_host(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "cache.num_pages": 77, "gateway.port": 0}
    processes, here = TwoHosts(), Future[None]()
    here.set_result(None)
    workers: list[FakeProcess] = []

    def look(_: object) -> None:
        if not workers and processes.groups:
            workers.extend(one for one in processes.groups[0].members if one.host == OTHER)
            until(lambda: all("load" in [method for method, _ in one.calls] for one in workers))
            assert sum(asked(*workers)) == 1
            assert not any(method == "open" for one in workers for method, _ in one.calls)
            next(one for one in workers if one.awaits("build")).answer_pending("build", [])

    cluster = Cluster(load_config(None, values), processes)
    cluster.start(look, lambda: here)
    cluster.stop()
    assert len(workers) == 2


def test_a_worker_runs_the_builder_of_its_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "import json, os, sys; print(json.dumps([sys.stdin.read(), os.getppid(), *sys.argv]))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(worker_actor, "BUILDER", "echo")
    order, parent, _, *arguments = WorkerActor.build(cast(WorkerActor, None), "order")
    assert (order, arguments) == ("order", [str(parent)])
