"""Marks the calls of an engine that are actions."""

from collections.abc import Callable
from typing import TypeVar

Action = TypeVar("Action", bound=Callable[..., object])


def action(method: Action) -> Action:
    """Marks a call that changes what an engine holds. Records contain these calls."""
    method.is_action = True  # type: ignore[attr-defined]
    return method


def calls_of(engine: type) -> dict[str, object]:
    """The members of a class and of its bases, by name."""
    return {name: member for each in reversed(engine.__mro__) for name, member in vars(each).items()}


def actions_of(engine: type) -> tuple[str, ...]:
    """The names of a class's actions."""
    return tuple(name for name, member in calls_of(engine).items() if getattr(member, "is_action", False))
