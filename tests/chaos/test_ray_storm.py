"""The short storm over `tandem up`; `python -m tests.chaos --ray` runs long ones."""

from pathlib import Path

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.chaos.ray_storm import RayStorm
from tests.chaos.storm import Blow
from tests.support.transports import skip_without

pytestmark = pytest.mark.long

TARGETS = ("decode", "gateway", "GCS", "decode", "raylet")
BLOWS = [Blow(20, target, "kill", 0.0) for target in TARGETS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shared_memory", "nixl"])
def test_every_end_is_typed_and_nothing_is_left(tmp_path: Path, transport: str) -> None:
    """Without the GCS another worker is lost. With the raylet the cluster is, and streams go on at the next launch."""
    skip_without(transport)
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=3)
    outcome = RayStorm(tmp_path / "model", seed=1, transport=transport).run(BLOWS)
    assert outcome.launches == 2
    assert outcome.recovered > 0
    assert outcome.finished >= 3  # each client that resumes has come to an end
    kinds = ("Unavailable", "HTTP error", "HTTP connection broken")
    assert [heard for heard in outcome.ends if not heard.startswith(kinds)] == []
    kinds += ("Cancelled",)  # so gRPC ends a call that a server which stops had not looked at; who resumes asks again
    assert [heard for heard in outcome.refused if not heard.startswith(kinds)] == []
