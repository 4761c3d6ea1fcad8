"""The short storm over `tandem up`; `python -m tests.chaos --ray` runs long ones."""

from pathlib import Path

import pytest

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tests.chaos.ray_storm import RayStorm
from tests.chaos.storm import Blow

BLOWS = [Blow(20, "decode", "kill", 0.0), Blow(20, "gateway", "kill", 0.0), Blow(20, "GCS", "kill", 0.0)]


@pytest.mark.timeout(600)
def test_every_end_is_typed_and_nothing_is_left(tmp_path: Path) -> None:
    """A worker, a gateway process, and then the GCS: the cluster is launched again, and streams go on there."""
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=3)
    outcome = RayStorm(tmp_path / "model", seed=1).run(BLOWS)
    assert outcome.launches == 2
    assert outcome.recovered > 0
    assert outcome.finished >= 3  # each client that resumes has come to an end
    kinds = ("Unavailable", "HTTP error", "HTTP connection broken")
    assert all(heard.startswith(kinds) for heard in outcome.ends + outcome.refused)
