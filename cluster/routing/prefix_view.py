"""Finds the workers that hold the KV of a prompt's beginning, by their reports."""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.prefix_chain import KEY_BYTES, digest_chain

BLOCK = 64  # pages that are looked up by their last one
MAX_GROUPS = 1024
Holder = TypeVar("Holder")


class PromptKeys:
    """Keys of a prompt's full pages, without the page of the last token. They are made once, as far as they are
    needed."""

    def __init__(self, token_ids: Int64Array, page_size: int, salt: bytes = b"") -> None:
        """token_ids: int64 [n], n at least 1."""
        self.page_size = page_size
        self.num_pages = (len(token_ids) - 1) // page_size
        self._chain: Iterator[bytes] = digest_chain(token_ids, page_size, self.num_pages, salt)
        self._keys: list[int] = []

    def first(self, count: int) -> list[int]:
        """Returns all keys made so far, in a list that grows: at least the first `count`, if there are so many."""
        missing = min(count, self.num_pages) - len(self._keys)
        self._keys += [int.from_bytes(digest[:KEY_BYTES], "little") for digest in islice(self._chain, max(0, missing))]
        return self._keys


class Report(Protocol):
    """The part of a WorkerReport that is about prefixes."""

    whole: bool
    added: bytes
    removed: bytes


class PrefixView(Generic[Holder]):
    """The keys of all workers' prefix indexes. Owned by the event loop.

    A key has a mask with a bit for each worker that holds its page. So one look-up covers all workers, and a page that
    many hold takes the memory of one. A worker's keys are as many as its cache has pages.

        0x5bd1…  ──►  0b0101     workers 0 and 2 hold this page

    The bits of gone workers stay in the masks, and match nothing, until they are as many as the others. One pass over
    all keys then removes them. So a worker's end costs as much as its own keys, however many others there are.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._bits: dict[Holder, int] = {}
        self._holders: dict[int, Holder] = {}
        self._groups: dict[int, tuple[Holder, ...]] = {}  # of masks that were met recently
        self._gone = 0  # the bits of workers that were dropped

    def __len__(self) -> int:
        """Returns the number of distinct keys, including those that only gone workers held."""
        return len(self._masks)

    def apply(self, holder: Holder, report: Report) -> None:
        """Applies a worker's removed keys, then its added ones. A whole report voids the worker's earlier reports."""
        if report.whole:
            self.drop(holder)
        masks = self._masks
        if report.removed and holder in self._bits:
            self._remove(np.frombuffer(report.removed, "<u8").tolist(), self._bits[holder])
        if report.added:
            bit = self._bit(holder)
            for key in np.frombuffer(report.added, "<u8").tolist():
                masks[key] = masks.get(key, 0) | bit

    def drop(self, holder: Holder) -> None:
        """Forgets a worker. Idempotent."""
        bit = self._bits.pop(holder, None)
        if bit is not None:
            del self._holders[bit]
            self._groups.clear()
            self._gone |= bit
            if self._gone.bit_count() >= len(self._holders):
                self._sweep()

    def match(self, prompt: PromptKeys) -> dict[Holder, int]:
        """Returns how many tokens at the prompt's beginning each worker holds the KV of; workers that hold none are
        left out.

        An index evicts the ends of prefixes first. So a worker that holds a page is taken to hold all before it.
        """
        masks = self._masks
        keys = prompt.first(1)
        mask = masks.get(keys[0], 0) & ~self._gone if keys and masks else 0
        found: dict[Holder, int] = {}
        pages = 1  # that `mask` holds
        while mask:
            end = min(pages + BLOCK, prompt.num_pages)
            if end > len(keys):
                prompt.first(end)  # the same list, longer
            left = masks.get(keys[end - 1], 0) & mask
            while mask != left:  # some of them hold no more than a part of this block
                low, high = pages, end - 1  # the first page that a worker lacks is between these two
                while low < high:
                    middle = (low + high) // 2
                    if masks.get(keys[middle], 0) & mask == mask:
                        low = middle + 1
                    else:
                        high = middle
                here = masks.get(keys[low], 0) & mask
                found.update(dict.fromkeys(self._group(mask & ~here), low * prompt.page_size))
                mask, left, pages = here, left & here, low + 1
            if end == prompt.num_pages:
                found.update(dict.fromkeys(self._group(mask), end * prompt.page_size))
                break
            pages = end
        return found

    def _group(self, mask: int) -> tuple[Holder, ...]:
        """Returns the workers whose bits are set. Most prompts meet the same few masks, so results are kept."""
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                self._groups.clear()
            group = self._groups[mask] = tuple(holder for bit, holder in self._holders.items() if mask & bit)
        return group

    def _bit(self, holder: Holder) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            bit = next(one for one in _powers() if one not in self._holders and not one & self._gone)
            self._bits[holder], self._holders[bit] = bit, holder
        return bit

    def _sweep(self) -> None:
        """Removes the bits of all gone workers from all masks."""
        stays = ~self._gone
        self._masks = {key: left for key, mask in self._masks.items() if (left := mask & stays)}
        self._gone = 0

    def _remove(self, keys: list[int], bit: int) -> None:
        masks = self._masks
        for key in keys:
            left = masks.get(key, 0) & ~bit
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)


def _powers() -> Iterator[int]:
    bit = 1
    while True:
        yield bit
        bit <<= 1
