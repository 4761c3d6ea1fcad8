"""What a cluster finds out before it starts anything."""

from pathlib import Path

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.errors import StartFailed
from tandem.cluster.launcher import Cluster
from tandem.workers.random_checkpoint import make_checkpoint
from tests.cluster.fake_processes import FakeProcesses


class CrampedProcesses(FakeProcesses):
    def check_room(self, processes: int, *, gpus: int) -> None:
        raise StartFailed(f"{processes} processes with {gpus} GPUs each are too many")


def test_islands_that_have_no_room_together(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    values = {"model.path": str(tmp_path / "model"), "num_islands": 2, "island.num_decode": 2, "gateway.port": 0}
    processes = CrampedProcesses()
    with pytest.raises(StartFailed, match=r"^num_islands is 2, .*num_decode 2: 6 processes with 0 GPUs each"):
        Cluster(load_config(None, values), processes).start()
    assert not processes.specs
