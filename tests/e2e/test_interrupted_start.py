"""SIGTERM while `tandem up` still starts: it prints so, exits with 0 and leaves nothing."""

import os
from pathlib import Path

import pytest

from tests.chaos.launched import Launched
from tests.chaos.ray_storm import SETTINGS
from tests.support.free_ports import free_ports


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", ["GCS", "process host"])
def test_a_start_is_interrupted(part: str, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(small_model)
    starting = Launched(tmp_path / "model", f"interrupted-{os.getpid()}-{part[0]}", free_ports(2), SETTINGS)
    starting.interrupt(part, 0.2)
