"""Tests what Ray's autoscaler is asked for."""

from typing import Any

import pytest
import ray.autoscaler.sdk

from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.ray_processes import RayProcesses

GPUS = Where(resources={"fast": 4}, labels={"zone": "north"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray.autoscaler.sdk, "request_resources", lambda **given: calls.append(given))
    return calls


def test_each_island_is_a_bundle_that_one_node_must_hold(asked: list[dict[str, Any]]) -> None:
    """A node has a resource of its own kind in all; islands take a trace of it, so that all can share it."""
    processes = RayProcesses()
    processes.ask_for_places(3, [1, 1, 2], gpus=1, where=GPUS)
    processes.ask_for_places(2, [1, 1], gpus=0, where=ANYWHERE)
    processes.ask_for_places(0, [1, 1, 2], gpus=1, where=GPUS)
    assert asked == [
        {"bundles": [{"CPU": 0.4, "GPU": 4, "fast": 0.001}] * 3, "bundle_label_selectors": [{"zone": "north"}] * 3},
        {"bundles": [{"CPU": 0.2}] * 2, "bundle_label_selectors": [{}] * 2},
        {"bundles": [], "bundle_label_selectors": []},
    ]


def test_an_island_over_hosts_is_a_bundle_for_each_worker(asked: list[dict[str, Any]]) -> None:
    RayProcesses().ask_for_places(2, [1, 4], gpus=1, where=Where(spread=True))
    island = [{"CPU": 0.1, "GPU": 1}, {"CPU": 0.4, "GPU": 4}]
    assert asked == [{"bundles": island * 2, "bundle_label_selectors": [{}] * 4}]


def test_the_request_is_one_that_ray_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray checks it before it tells its autoscaler."""
    taken: list[tuple[Any, ...]] = []
    monkeypatch.setattr("ray.autoscaler._private.commands.request_resources", lambda *given: taken.append(given))
    RayProcesses().ask_for_places(1, [1, 1], gpus=1, where=GPUS)
    assert taken == [(None, [{"CPU": 0.2, "GPU": 2, "fast": 0.001}], [{"zone": "north"}])]
