"""The short storm of tests/chaos over NVSHMEM: two islands on this host's GPUs."""

from pathlib import Path

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.chaos.storm import Storm
from tests.gpu.pe_process import NEEDS_NVSHMEM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), NEEDS_NVSHMEM]


def test_nothing_is_lost_in_a_storm(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=3)
    outcome = Storm(tmp_path / "model", tmp_path / "faults", seed=1, gpus=True).run(num_blows=15, num_requests=40)
    assert not outcome.errors
    assert outcome.finished >= 25
    assert outcome.placed_again > 0
    assert min(outcome.restarts.values()) > 0
