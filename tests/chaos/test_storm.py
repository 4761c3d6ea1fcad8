"""The short storm; `make chaos` runs long ones."""

from pathlib import Path

import pytest

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tests.chaos.storm import Storm


@pytest.mark.timeout(300)
@pytest.mark.parametrize("adaptive", [False, True], ids=["split", "adaptive"])
def test_nothing_is_lost_in_a_storm(tmp_path: Path, adaptive: bool) -> None:
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=3)
    outcome = Storm(tmp_path / "model", tmp_path / "faults", seed=1, adaptive=adaptive).run(30, 60)
    assert not outcome.errors
    assert outcome.finished >= 40
    assert outcome.finished_over_http > 0
    assert outcome.placed_again > 0
    assert min(outcome.restarts.values()) > 0
    assert (outcome.moves > 0) == adaptive
