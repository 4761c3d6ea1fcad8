"""Targets and times of `scaling` that the simulations of its policies share."""

from typing import Any

SECONDS: dict[str, Any] = {
    "queue_seconds": 2.0,
    "first_token_seconds": 1.0,
    "token_seconds": 0.1,
    "up_after_seconds": 30.0,
    "down_after_seconds": 300.0,
    "cooldown_seconds": 60.0,
}
