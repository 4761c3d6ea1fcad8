"""Prompts whose beginnings come up from a disk before they are computed."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from tandem.workers.engine.admission import MostBytes
from tandem.workers.engine.engine import Engine
from tandem.workers.wire.prompt_spec import PromptSpec

POLL_SECONDS = 0.001  # while pages are on their way
MOST_LIFTS = 64  # under way at once


class Lift(NamedTuple):
    number: int
    done: "Future[None]"


class Lifts:
    """Owned by the step thread. A request asks for its prompt's pages before it is submitted, and waits.

    begin() ──lift──► disk reads into host memory ──upkeep(), land──► submit: the prompt finds them there
    """

    def __init__(self, engine: Engine, most_bytes: MostBytes, is_sharing: Callable[[PromptSpec], bool]) -> None:
        """most_bytes: as in Admission, of what is read and then copied. is_sharing: whether a prompt takes prefixes."""
        self._engine, self._most_bytes, self._is_sharing = engine, most_bytes, is_sharing
        self._under_way: deque[Lift] = deque()

    def begin(self, prompt: PromptSpec) -> "Future[None] | None":
        """Returns a future that ends once the pages that a disk has of the prompt's beginning are in host memory. None
        if it has none, if there is no room for them now, or if computing takes less time."""
        if not self._is_sharing(prompt) or len(self._under_way) >= MOST_LIFTS:
            return None
        wanted = self._engine.below(prompt, self._most_bytes())
        number = self._engine.lift(wanted) if wanted else 0
        if not number:
            return None
        if not self._under_way or self._under_way[-1].number < number:
            self._under_way.append(Lift(number, Future()))
            self._under_way[-1].done.set_running_or_notify_cancel()  # one that waits cannot cancel it for others
        return next(lift.done for lift in self._under_way if lift.number == number)

    def upkeep(self) -> None:
        """Lands what has come. The loop calls it with each step."""
        self._engine.tend()
        while self._under_way and self._engine.is_lifted(self._under_way[0].number):
            lift = self._under_way.popleft()
            self._engine.land(lift.number)
            lift.done.set_result(None)

    def soon(self, wait: float | None) -> float | None:
        """Returns the seconds after which upkeep() has to run again, in place of `wait`."""
        return min(POLL_SECONDS if wait is None else wait, POLL_SECONDS) if self._under_way else wait
