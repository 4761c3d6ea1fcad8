"""Checksums that show whether pages that come back from a store have changed."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array

WEIGHT_SEED = 1


class PageSums:
    """The checksums of one shelf, by slot, on the pool's device: Σ word · odd weight modulo 2⁶⁴. A single changed word
    always changes it."""

    def __init__(self, pool: Tensor, num_slots: int) -> None:
        """pool: [num_pages, n], see words_of."""
        self._pool = pool
        self._weights = _odd_weights(pool)
        self._on_host = self._weights.cpu().numpy()
        self._sums = torch.zeros(num_slots, dtype=torch.int64, device=pool.device)

    def note(self, pages: Int32Array, slots: Int32Array) -> None:
        """Stores the checksum of pages[i] for slots[i]; int32 [n] both."""
        for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
            self._sums[slot] = self._sum(page)

    def of_host(self, page: NDArray[np.uint8]) -> int:
        """The sum of a page, uint8 [n], in host memory. From any thread."""
        words = page.view(np.int64) if self._on_host.size * 8 == page.size else page.astype(np.int64)
        return int(np.dot(words, self._on_host))

    def set(self, slot: int, total: int) -> None:
        """A slot got a page with that sum."""
        self._sums[slot] = total

    def are_bad(self, pages: Int32Array, slots: Sequence[int]) -> list[bool]:
        """Returns whether pages[i] differs from what went to slots[i]. Waits for the device."""
        return [bool(self._sum(page) != self._sums[slot]) for page, slot in zip(pages.tolist(), slots, strict=True)]

    def _sum(self, page: int) -> Tensor:
        return (self._pool[page].long() * self._weights).sum()


def words_of(pool: Tensor) -> Tensor:
    """[num_pages, n]: pages as int64, or as bytes if their size is no multiple of 8."""
    pages = pool.view(torch.uint8).view(pool.shape[0], -1)
    return pages.view(torch.int64) if pages.shape[1] % 8 == 0 else pages


def _odd_weights(words: Tensor) -> Tensor:
    """int64 [n], for words [num_pages, n]; the same each time."""
    generator = torch.Generator().manual_seed(WEIGHT_SEED)
    return (torch.randint(-(1 << 62), 1 << 62, words.shape[1:], generator=generator) | 1).to(words.device)
