"""Requests that move between two workers while they are decoded."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from tandem.cluster.requests import rebalancer
from tandem.cluster.routing.policy import WorkerLoad
from tandem.cluster.routing.rebalance import Move


def move_back_and_forth(
    number: int, monkeypatch: pytest.MonkeyPatch, begins: Callable[[], bool] = lambda: True
) -> None:
    """Moves `number` requests every 50 ms from the first worker to the second, and then back. None move before
    begins()."""
    looks = itertools.count()

    def all_move(workers: Sequence[WorkerLoad], token_seconds: float) -> list[Move]:
        if not begins():
            return []
        source, target = workers if next(looks) % 2 else workers[::-1]
        return [Move(source, target, number)]

    monkeypatch.setattr(rebalancer, "moves", all_move)
    monkeypatch.setattr(rebalancer, "PERIOD_SECONDS", 0.05)
