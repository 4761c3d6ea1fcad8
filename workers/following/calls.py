"""The messages of a leader to its followers: one before each call of its engine, and one after each action."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tandem.workers.replay.codec import ValueType
from tandem.workers.replay.value_types import HANDLES, value_types

AGREE_SECONDS = 10.0  # in which an error is to be one of all ranks
FENCE, MARK, DIGEST, WELCOME, END = "fence", "mark", "digest", "welcome", "end"  # in addition to names of actions
ALONE = frozenset({"recall", "withdraw", "answer"})
"""Actions of the leader alone: recalls go from first rank to first rank."""


class Ended(NamedTuple):
    """How an action ended at the leader, which is the same for all ranks. made: the numbers of the handles in its
    result. raised: the type of its error. free: pages that are free after it."""

    made: tuple[int, ...] = ()
    raised: str = ""
    free: int = -1


class Call(NamedTuple):
    """gone: the numbers of objects that the leader does not know any more. name: of an action, or one of the above."""

    gone: tuple[int, ...]
    name: str
    arguments: tuple[Any, ...]


def call_types() -> list[ValueType]:
    return [ValueType(Ended), ValueType(Call), *value_types()]


def handles_in(result: Any) -> Iterator[Any]:
    """Yields the handles in a result that later calls may name, in order."""
    if isinstance(result, HANDLES):
        yield result
    elif isinstance(result, list | tuple):
        for part in result:
            yield from handles_in(part)
