"""A start in which a worker hangs while its process goes on answering, as NVSHMEM's does when a peer does not come."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.supervision import heartbeat
from tandem.cluster.supervision.island import LoadState
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.workers.config import WorkerConfig
from tests.support.local_processes import LocalProcesses


class HangingWorker(WorkerActor):
    """A worker that waits for ever where it should map its peers."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._worker.join = lambda handles: threading.Event().wait()  # type: ignore[method-assign]


class HangingProcesses(LocalProcesses):
    def _start(self, specs: Sequence[ActorSpec]) -> list[ForkedActor]:
        return super()._start([replace(spec, kind=HangingWorker) if "decode" in spec.name else spec for spec in specs])


def test_the_worker_and_the_phase_are_named(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "WARN_SECONDS", 0.5)
    monkeypatch.setattr(heartbeat, "MEETING_SECONDS", 1.5)
    overrides: dict[str, Any] = {"gateway.port": 0, "island.threads_per_worker": 1, "cache.num_pages": 64}
    processes, shown = HangingProcesses(), list[LoadState]()
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **overrides}), processes)
    with pytest.raises(
        ProcessEnded, match=r"decode \(PE 1\) ended: it has made no progress for 1\.\d s in phase 'island'"
    ):
        cluster.start(shown.extend)
    noted = [record.message for record in caplog.records if record.name == heartbeat.__name__]
    assert "local.1/decode (PE 1) has made no progress for" in noted[-1]
    assert noted[-1].endswith("in phase 'island' of its start")
    assert {phase for name, phase, *_ in shown if name == "local decode (PE 1)"} >= {"island"}
    assert not processes.pids
