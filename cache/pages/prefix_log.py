"""The recent changes of a prefix index, for readers that each come at their own pace."""

from collections import deque
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PrefixKeys = NDArray[np.uint64]
"""Names of full pages, uint64 [n]: the first 8 bytes of each digest, little-endian."""


class PrefixChanges(NamedTuple):
    """`position` is where the next report begins. Where `whole` is set, `added` are all keys. None stands twice."""

    position: int
    whole: bool
    removed: PrefixKeys
    added: PrefixKeys


class PrefixLog:
    """Records of keys in their order. The oldest are forgotten. Owned by the step thread."""

    def __init__(self, max_keys: int) -> None:
        """max_keys: in all records together."""
        self._max_keys = max_keys
        self._num_keys = 0
        self._records: deque[tuple[bool, PrefixKeys]] = deque()
        self.position = 0
        """The number of records so far; a reader on another thread sees by it that something has changed."""

    def add(self, keys: PrefixKeys) -> None:
        self._append(True, keys)

    def remove(self, keys: PrefixKeys) -> None:
        self._append(False, keys)

    def since(self, position: int) -> tuple[PrefixKeys, PrefixKeys] | None:
        """Returns (removed, added) from that position on; None where some records are forgotten. The last record of
        a key counts."""
        wanted = self.position - position
        if not 0 <= wanted <= len(self._records):
            return None
        newest_first = list(islice(reversed(self._records), wanted))
        if not newest_first:
            return _NO_KEYS, _NO_KEYS
        keys = np.concatenate([keys[::-1] for _, keys in newest_first])
        if all(added for added, _ in newest_first):
            return _NO_KEYS, keys[::-1]
        added = np.repeat([added for added, _ in newest_first], [keys.size for _, keys in newest_first])
        distinct, first = np.unique(keys, return_index=True)
        return distinct[~added[first]], distinct[added[first]]

    def _append(self, added: bool, keys: PrefixKeys) -> None:
        if not keys.size:
            return
        self._records.append((added, keys))
        self._num_keys += keys.size
        while self._num_keys > self._max_keys:
            self._num_keys -= self._records.popleft()[1].size
        self.position += 1


_NO_KEYS: PrefixKeys = np.zeros(0, np.uint64)
