"""The face of a cache towards a disk below its store, the end of both, and their counts."""

from collections.abc import Sequence

from tandem.cache.operations.holdings import PageCounts
from tandem.cache.operations.parts import Parts
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.prefix_chain import encoder_salt
from tandem.cache.store.page_store import PageNames


class StoredCalls(Parts):
    """below() finds pages on the disk, lift() begins to read them into the store, land() ends that. Then match_prefix()
    finds them."""

    def below(
        self, token_ids: Int64Array, salt: bytes, encoder_len: int = 0, most_bytes: int | None = None
    ) -> list[tuple[int, list[bytes]]]:
        """Returns the first pages of a prompt that lift() can bring up. Empty where the disk has none, or where that
        would read more than most_bytes for each position. Depends on time. See match_prefix."""
        size = self.layout.page_size
        if encoder_len:
            salt = encoder_salt(token_ids[:encoder_len], salt)
        most, border = max(token_ids.size - 1, 0) // size, -(-encoder_len // size)
        return self._pools.below(token_ids, most, salt, border, most_bytes)

    def lift(self, wanted: Sequence[PageNames]) -> int:
        """See PageStore.lift."""
        store = self._pools.prefixes.store
        number = 0 if store is None else store.lift(wanted)
        self._pools.prefixes.forget_stored()
        return number

    def land(self, number: int) -> int:
        """See PageStore.land."""
        store = self._pools.prefixes.store
        return 0 if store is None else store.land(number)

    def tend(self) -> None:
        """See PageStore.tend."""
        self._pools.prefixes.tend()

    def close(self) -> None:
        """Waits for copies between the pools and the stores, whose memory may end afterwards, and gives up the disk.
        Idempotent."""
        self._pools.copies.finish()
        if self._pools.prefixes.store is not None:
            self._pools.prefixes.store.close()


def with_store(counts: PageCounts, pools: PagePools) -> PageCounts:
    """Adds the counts of the prefix index's store, if there is one, and of the disk below it."""
    if (below := pools.prefixes.store) is None:
        return counts
    store, disk = below.counts, below.disk_counts
    counts = counts._replace(
        host_bytes=store.capacity,
        host_bytes_used=store.used,
        host_pages_down=store.pages_down,
        host_pages_up=store.pages_up,
        host_hits=store.hits,
        host_bad_pages=store.bad_pages,
        host_skipped_hits=pools.num_skipped,
    )
    if disk is None:
        return counts
    return counts._replace(
        disk_bytes=disk.capacity,
        disk_bytes_used=disk.used,
        disk_pages_down=disk.written,
        disk_pages_up=disk.read,
        disk_bad_pages=disk.bad,
        disk_lost_pages=disk.lost,
        disk_errors=disk.failed,
        disk_adopted_pages=disk.adopted,
        disk_skipped_hits=pools.num_unread,
    )
