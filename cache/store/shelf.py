"""Which pages of one layer group a store has, and in which of its slots."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class Shelf:
    """Slots by the digests of their pages, the least recently used of which give way. A page stays when it is fetched:
    one that is evicted again is not copied again."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._next = 0  # the first slot that was never used
        self._free = list[int]()  # those that were, and are not now
        self._held = frozenset[bytes]()
        self._forgotten = list[bytes]()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def digests(self) -> list[bytes]:
        """All of them."""
        return list(self._slots)

    def slots(self, digests: Iterable[bytes]) -> list[int]:
        """Of known ones."""
        return [self._slots[digest] for digest in digests]

    def hold(self, digests: Sequence[bytes]) -> None:
        """Until the next call put() gives none of these up. They become the last used, the first of them last."""
        known = [digest for digest in digests if digest in self._slots]
        for digest in reversed(known):
            self._slots.move_to_end(digest)
        self._held = frozenset(known)

    def put(self, digest: bytes) -> int | None:
        """The slot for a new page; None: it is known, or nothing may give way."""
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

    def drop(self, digest: bytes) -> None:
        self._free.append(self._slots.pop(digest))
        self._forgotten.append(digest)

    def take_forgotten(self) -> list[bytes]:
        """Those that were dropped since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten
