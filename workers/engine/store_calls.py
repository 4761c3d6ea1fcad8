"""The calls of an engine about its stores in host memory."""

from collections.abc import Sequence

from tandem.cache.paged_cache import PagedKVCache
from tandem.workers.engine.actions import action
from tandem.workers.wire.prompt_spec import PromptSpec


class StoreCalls:
    """See Engine."""

    _cache: PagedKVCache

    @action
    def widen(self, slots: Sequence[int]) -> None:
        """Lets the store use this many slots of each layer group: see ready_slots. Replays and ranks get as many at the
        same place among the actions."""
        if self._cache.page_store is not None:
            self._cache.page_store.widen(slots)

    @action
    def lift(self, wanted: list[tuple[int, list[bytes]]]) -> int:
        """Has each rank begin to read from its disk what below() found, see PageStore.lift."""
        return self._cache.lift(wanted)

    @action
    def land(self, number: int) -> int:
        """Adds the pages of lift() that all ranks have read to the store. Returns how many there are."""
        return self._cache.land(number)

    def below(self, prompt: PromptSpec, most_bytes: int | None) -> list[tuple[int, list[bytes]]]:
        """A poll: see PagedKVCache.below; most_bytes as in Admission, of what is read."""
        return self._cache.below(prompt.token_ids, prompt.salt, prompt.encoder.length, most_bytes)

    def is_lifted(self, number: int) -> bool:
        """A poll: see PageStore.is_lifted."""
        store = self._cache.page_store
        return store is None or store.is_lifted(number)

    def tend(self) -> None:
        """Runs PageStore.tend. The loop calls it with each step. It changes nothing that the store holds."""
        self._cache.tend()

    @property
    def has_disk(self) -> bool:
        """Returns whether the store has a disk. Any thread may ask."""
        store = self._cache.page_store
        return store is not None and store.has_disk

    @property
    def disk_rate(self) -> float:
        """A poll: bytes a second that were read from the disk lately; 0 before the first."""
        store = self._cache.page_store
        return 0.0 if store is None else store.disk_rate

    def has_arrived(self, sequence: int) -> bool:
        """A poll: see PagedKVCache.has_arrived."""
        return self._cache.has_arrived(sequence)

    @property
    def bytes_in_copies(self) -> int:
        """A poll: see PagedKVCache.bytes_in_copies."""
        return self._cache.bytes_in_copies

    @property
    def ready_slots(self) -> tuple[int, ...] | None:
        """A poll: see PageStore.ready_slots; None without a store."""
        store = self._cache.page_store
        return None if store is None else store.ready_slots

    @property
    def copy_rate(self) -> float:
        """A poll: bytes a second that copies of prefixes from the store have moved lately; 0 before the first."""
        store = self._cache.page_store
        return 0.0 if store is None else store.copies.rate
