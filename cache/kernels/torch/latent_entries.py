"""A pool with one plane of one head, latents or index keys, as rows that torch operations read and write."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.page_memory import PageOperations
from tandem.cache.plan.arrays import Int32Array, IntArray
from tandem.cache.plan.rope import Rotation


class LatentEntries(PageOperations):
    """Row ids are those of layer 0; a layer's entries are a view of the pool that begins there."""

    def __init__(self, pool: Tensor, rank: int) -> None:
        super().__init__(pool)
        _, layers, _, _, self.page_size, self.entry_size = pool.shape
        self.pool = pool
        self.rank = rank
        self._page_rows = layers * self.page_size
        entries = pool.view(-1, self.entry_size)
        self.entries = [entries[layer * self.page_size :] for layer in range(layers)]

    def rows(self, slots: NDArray[np.integer]) -> Tensor:
        """int64 [n]: the rows of slots [n]."""
        pages, offsets = np.divmod(slots.astype(np.int64), self.page_size)
        return self.index(pages * self._page_rows + offsets)

    def rows_of(self, positions: Tensor, firsts: Tensor, kv_indices: Tensor) -> Tensor:
        """int64 [n, k]: the rows of positions [n, k], at least 0, in sequences whose pages begin at firsts [n]."""
        pages = kv_indices[firsts[:, None] + positions // self.page_size]
        return pages.long() * self._page_rows + positions % self.page_size

    def index(self, ids: IntArray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.pool.device)

    def store(self, layer: int, latents: Tensor, keys: Tensor, rotation: Rotation | None, rows: Tensor) -> Tensor:
        """The entries [T, 1, rank + rotated] of latents [T, rank] and keys [T, rotated], which fill `rows`."""
        keys = keys.unsqueeze(1)
        if rotation is not None:
            keys = rotation.apply(keys)
        entries = torch.cat((latents.unsqueeze(1), keys), 2)
        self.entries[layer].index_copy_(0, rows, entries.squeeze(1))
        return entries

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        entries = self.entries[layer].index_select(0, self.rows(slots)).unsqueeze(1)
        return entries, entries[:, :, : self.rank]


def rotate_last(q: Tensor, still: int, rotation: Rotation | None) -> Tensor:
    """q [T, heads, still + rotated] with the last numbers of each head rotated."""
    return q if rotation is None else torch.cat((q[:, :, :still], rotation.apply(q[:, :, still:])), 2)
