"""The own GPU stays the first that a worker's process sees."""

import os
import sys

import pytest

from tandem.cluster.processes.gpus import MOST_GPUS, VARIABLE, with_peers
from tandem.cluster.supervision import worker_actor
from tandem.workers.config import Role, WorkerConfig


@pytest.mark.parametrize("own", [0, 3, MOST_GPUS])
def test_others_come_behind_the_own_gpu(own: int) -> None:
    seen = [int(name) for name in with_peers(str(own)).split(",")]
    assert seen[0] == own
    assert seen[1:] == [other for other in range(MOST_GPUS) if other != own]


@pytest.mark.parametrize("visible", ["", "-1", "0,1", "GPU-1f2e", "MIG-1f2e"])
def test_what_names_no_single_gpu_by_its_number_stays(visible: str) -> None:
    assert with_peers(visible) == visible


@pytest.mark.parametrize(("device", "seen"), [("cuda", "2,0,1,3"), ("cpu", "2")])
def test_a_worker_on_a_gpu_sees_its_peers(device: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of it can touch a GPU. Its step thread does not wait for the interpreter for long."""
    at_first: list[str] = []
    intervals: list[float] = []
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setattr(sys, "setswitchinterval", intervals.append)
    monkeypatch.setattr(worker_actor, "Worker", lambda config: at_first.append(os.environ[VARIABLE]))
    config = WorkerConfig(
        role=Role.PREFILL, island="a", epoch=1, pe=0, num_pes=2, model_path="", max_model_len=8, token="", device=device
    )
    worker_actor.WorkerActor(config)
    assert at_first[0].split(",")[: seen.count(",") + 1] == seen.split(",")
    assert ("," in at_first[0]) == ("," in seen)
    assert intervals == ([worker_actor.SWITCH_SECONDS] if device == "cuda" else [])
