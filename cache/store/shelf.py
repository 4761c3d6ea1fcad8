"""The pages of one layer group that a store has, and their slots: an LRU cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Shelf:
    """Slots by the digests of their pages. The least recently used pages are evicted. A page stays here when it is
    fetched, so it need not be copied again when the pool evicts it again."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._next = 0  # the first slot that was never used
        self._free = list[int]()  # slots that were used and are free now
        self._held = frozenset[bytes]()
        self.reserved: dict[bytes, int] = {}
        """Slots of pages that are yet to come; to be read only."""
        self._forgotten = list[bytes]()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def digests(self) -> list[bytes]:
        """The digests of all pages."""
        return list(self._slots)

    def slots(self, digests: Iterable[bytes]) -> list[int]:
        """The slots of pages that are here."""
        return [self._slots[digest] for digest in digests]

    def adopt(self, slots: dict[bytes, int]) -> None:
        """Slots that are filled, the least recently used first. Nothing was put before."""
        self._slots, self._next = OrderedDict(slots), max(slots.values(), default=-1) + 1
        self._free = sorted(set(range(self._next)) - set(slots.values()), reverse=True)

    def hold(self, digests: Sequence[bytes]) -> None:
        """Protects these pages from eviction until the next call. They count as just used, the first one last."""
        known = [digest for digest in digests if digest in self._slots]
        for digest in reversed(known):
            self._slots.move_to_end(digest)
        self._held = frozenset(known)

    def put(self, digest: bytes) -> int | None:
        """The slot for a new page; None if the page is here already, or no page may be evicted."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        if not self._free and self._next < self.num_slots:
            self._free.append(self._next)
            self._next += 1
        if not self._free:
            oldest = next(iter(self._slots), None)
            if oldest is None or oldest in self._held:
                return None
            self.drop(oldest)
        self._slots[digest] = slot = self._free.pop()
        return slot

    def reserve(self, digests: Sequence[bytes]) -> list[int] | None:
        """Slots for pages that are yet to come, which are not known before place(). The least recently used ones give
        way; None, and nothing changes, where there are fewer than so many."""
        room = self.num_slots - len(self.reserved) - len(self._held)
        if len(digests) > room:
            return None
        for digest in digests:
            slot = self.put(digest)
            assert slot is not None, "there is room for it, and it is not known"
            del self._slots[digest]
            self.reserved[digest] = slot
        return [self.reserved[digest] for digest in digests]

    def place(self, digest: bytes, *, is_good: bool) -> int | None:
        """A page has come into its reserved slot, or has not. Returns the slot; None where that is free again."""
        slot = self.reserved.pop(digest)
        if not is_good or digest in self._slots:
            self._free.append(slot)
            return None
        self._slots[digest] = slot
        return slot

    def drop(self, digest: bytes) -> None:
        self._free.append(self._slots.pop(digest))
        self._forgotten.append(digest)

    def take_forgotten(self) -> list[bytes]:
        """The digests of pages that were dropped since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten
