"""A short storm at the gate, longer ones of each kind; `make chaos` runs long ones."""

from pathlib import Path

import pytest

from tests.chaos.storm import RANKS, WORKERS, Storm
from tests.chaos.targets import make_target
from tests.support.transports import skip_without


@pytest.mark.timeout(300)
def test_nothing_is_lost_in_a_short_storm(tmp_path: Path) -> None:
    model, _ = make_target(tmp_path)
    outcome = Storm(model, tmp_path / "faults", seed=1).run(6, 12)
    assert not outcome.errors
    assert outcome.finished >= 8
    assert outcome.finished_over_http > 0
    assert outcome.placed_again > 0
    assert max(outcome.restarts.values()) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "nixl"])
@pytest.mark.parametrize(("roles", "drafter"), [("split", None), ("adaptive", "mtp"), ("colocated", None)])
def test_nothing_is_lost_in_a_storm(tmp_path: Path, roles: str, drafter: str | None, transport: str) -> None:
    skip_without(transport)
    model, settings = make_target(tmp_path, speculate=drafter)
    settings |= {"island.transport": transport}
    storm = Storm(model, tmp_path / "faults", seed=1, roles=roles, settings=settings)
    outcome = storm.run(16, 40)
    assert not outcome.errors
    assert outcome.finished >= 25
    assert outcome.finished_over_http > 0
    assert outcome.placed_again > 0
    assert min(outcome.restarts.values()) > 0
    assert (outcome.moves > 0) == (roles == "adaptive")
    assert (outcome.accepted > 0) == (drafter is not None)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("roles", ["split", "adaptive"])
def test_nothing_is_lost_where_a_layer_drafts_beside_states(tmp_path: Path, roles: str) -> None:
    model, settings = make_target(tmp_path, "qwen3_next", "mtp")
    outcome = Storm(model, tmp_path / "faults", seed=1, roles=roles, settings=settings).run(16, 40)
    assert not outcome.errors
    assert outcome.finished >= 25
    assert outcome.placed_again > 0
    assert outcome.accepted > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_nothing_is_lost_while_workers_of_one_island_are_replaced(tmp_path: Path, transport: str) -> None:
    """They are lost faster than others take their places, so that several join together."""
    skip_without(transport)
    model, _ = make_target(tmp_path)
    settings = {**WORKERS, "island.transport": transport}
    outcome = Storm(model, tmp_path / "faults", seed=2, settings=settings).run(40, 40)
    assert not outcome.errors
    assert outcome.finished >= 25
    assert outcome.placed_again > 0
    assert outcome.restarts["local"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("transport", "prefill", "decode"), [("tcp", 2, 2), ("tcp", 1, 2), ("nixl", 2, 2)])
def test_nothing_is_lost_while_workers_of_ranks_are_replaced(
    tmp_path: Path, transport: str, prefill: int, decode: int
) -> None:
    """Blows hit any of their ranks."""
    skip_without(transport)
    model, _ = make_target(tmp_path)
    ranks = {"island.prefill_ranks": prefill, "island.decode_ranks": decode, "island.num_decode": 2}
    settings = {**RANKS, **ranks, "island.transport": transport}
    outcome = Storm(model, tmp_path / "faults", seed=5, roles="adaptive", settings=settings).run(24, 30)
    assert not outcome.errors
    assert outcome.finished >= 20
    assert outcome.placed_again > 0
    assert outcome.restarts["local"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("roles", "num_blows"), [("split", 4), ("adaptive", 16)], ids=["split", "adaptive"])
def test_nothing_is_lost_in_a_storm_over_ranks(tmp_path: Path, roles: str, num_blows: int) -> None:
    model, _ = make_target(tmp_path)
    outcome = Storm(model, tmp_path / "faults", 3, roles=roles, settings=RANKS).run(num_blows, 2 * num_blows)
    assert not outcome.errors
    assert outcome.finished >= num_blows
    assert outcome.placed_again > 0 or num_blows < 16  # a few blows may all hit workers without requests
    assert max(outcome.restarts.values()) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_while_somebody_attacks(tmp_path: Path) -> None:
    model, _ = make_target(tmp_path)
    outcome = Storm(model, tmp_path / "faults", seed=2, attacked=True).run(6, 20)
    assert not outcome.errors
    assert outcome.finished > 0
    assert outcome.attacks
