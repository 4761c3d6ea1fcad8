"""Sequences that are given up while forwards of theirs may still run."""

from collections import deque
from collections.abc import Callable

from tandem.cache.paged_cache import PagedKVCache

IsPast = Callable[[], bool]
"""Whether the device is past all that was launched when this was made."""


class RetiredSequences:
    """Keeps their pages until the device is past those forwards. Owned by the step thread.

    Work that is launched later could have the pages at once, for it runs later. A peer that writes into them could not:
    its writes know no order with what runs here.
    """

    def __init__(self, cache: PagedKVCache, mark: Callable[[], IsPast | None]) -> None:
        """mark: see ModelRunner.mark."""
        self._cache = cache
        self._mark = mark
        self._waiting: deque[tuple[IsPast, int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence_id: int) -> None:
        """Removes the sequence, now where nothing that was launched is under way."""
        is_past = self._mark()
        if is_past is None:
            self._cache.remove_sequence(sequence_id)
        else:
            self._waiting.append((is_past, sequence_id))

    def settle(self) -> None:
        """Removes those that nothing computes any more."""
        while self._waiting and self._waiting[0][0]():
            self._cache.remove_sequence(self._waiting.popleft()[1])
