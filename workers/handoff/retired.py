"""Pages that are given up while forwards that use them may still run."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tandem.workers.engine.engine import Engine

IsPast = Callable[[], bool]
"""Returns whether the device is past all that was launched when the function was made."""


class RetiredSequences:
    """Keeps their pages until the device is past those forwards. Owned by the step thread.

    Work that is launched later could have the pages at once. A peer's writes could not: nothing orders them after the
    forwards that run here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[tuple[IsPast, Callable[[], object]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence_id: int) -> None:
        """Removes the sequence, now where nothing that was launched is under way."""
        self._do(partial(self._engine.free, sequence_id))

    def windows_past(self) -> "Future[None] | None":
        """Ends once peers may write into pages that are free or reserved now, or None at once.

        Layouts that drop what is past or keep states, and sequences that slide, keep them waiting: they free pages that
        a forward may still use. So do copies between the pools and a store.
        """
        is_past = self._engine.peers_mark()
        if is_past is None:
            return None
        past: Future[None] = Future()
        self._waiting.append((is_past, partial(past.set_result, None)))
        return past

    def settle(self) -> None:
        """Runs the actions that no work on the device blocks any more."""
        while self._waiting and self._waiting[0][0]():
            self._waiting.popleft()[1]()

    def _do(self, action: Callable[[], object]) -> None:
        """Runs the action once the device is past all that was launched."""
        is_past = self._engine.mark()
        if is_past is None:
            action()
        else:
            self._waiting.append((is_past, action))
