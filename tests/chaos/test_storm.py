"""The short storm; `make chaos` runs long ones."""

from pathlib import Path

import pytest

from tests.chaos.storm import Storm
from tests.chaos.targets import make_target


@pytest.mark.timeout(300)
@pytest.mark.gate("short")
@pytest.mark.parametrize(
    ("roles", "drafter", "blows", "requests"),
    [
        pytest.param("split", None, 6, 12, id="short"),
        ("split", None, 16, 40),
        ("adaptive", "mtp", 16, 40),
        ("colocated", None, 16, 40),
    ],
)
def test_nothing_is_lost_in_a_storm(tmp_path: Path, roles: str, drafter: str | None, blows: int, requests: int) -> None:
    model, settings = make_target(tmp_path, speculate=drafter)
    storm = Storm(model, tmp_path / "faults", seed=1, roles=roles, settings=settings)
    outcome = storm.run(blows, requests)
    assert not outcome.errors
    assert outcome.finished >= requests * 5 // 8
    assert outcome.finished_over_http > 0
    assert outcome.placed_again > 0
    assert min(outcome.restarts.values()) > 0
    assert (outcome.moves > 0) == (roles == "adaptive")
    assert (outcome.accepted > 0) == (drafter is not None)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_while_somebody_attacks(tmp_path: Path) -> None:
    model, _ = make_target(tmp_path)
    outcome = Storm(model, tmp_path / "faults", seed=2, attacked=True).run(6, 20)
    assert not outcome.errors
    assert outcome.finished > 0
    assert outcome.attacks
