"""The calls of an engine about the store behind its prefix index."""

from collections.abc import Sequence

from tandem.cache.paged_cache import PagedKVCache
from tandem.workers.engine.actions import action


class StoreCalls:
    """See Engine."""

    _cache: PagedKVCache

    @action
    def widen(self, slots: Sequence[int]) -> None:
        """The store may use so many slots of each layer group: see ready_slots. Replays and ranks get as many at the
        same place among the actions."""
        if self._cache.page_store is not None:
            self._cache.page_store.widen(slots)

    def has_arrived(self, sequence: int) -> bool:
        """A poll: see PagedKVCache.has_arrived."""
        return self._cache.has_arrived(sequence)

    @property
    def ready_slots(self) -> tuple[int, ...] | None:
        """A poll: see PageStore.ready_slots; None without a store."""
        store = self._cache.page_store
        return None if store is None else store.ready_slots

    @property
    def copy_rate(self) -> float:
        """A poll: bytes a second that copies from the store have moved lately; 0 before the first."""
        store = self._cache.page_store
        return 0.0 if store is None else store.copies.rate
