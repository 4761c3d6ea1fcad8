"""A pool with one plane of one head, latents or index keys, as rows that torch operations read and write."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.page_memory import PageOperations, movable
from tandem.cache.plan.arrays import Int32Array, IntArray
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.rope import Rotation


class LatentEntries(PageOperations):
    """Entries by the row ids of layer 0. A layer's rows are a view of the pool that begins at the layer. fp8: the
    form of entries in a pool of 8 bits."""

    def __init__(self, pool: Tensor, rank: int, fp8: Fp8Rows | None = None) -> None:
        super().__init__(pool)
        _, layers, _, _, self.page_size, size = pool.shape
        self.pool = pool
        self.rank = rank
        self.entry_size = size if fp8 is None else fp8.width
        self._fp8 = fp8
        self._page_rows = layers * self.page_size
        stored = movable(pool).view(-1, size)
        self._layers = [stored[layer * self.page_size :] for layer in range(layers)]

    def entries(self, layer: int, rows: Tensor) -> Tensor:
        """Copies the entries at rows, int64 [n], to [n, rank + rotated]."""
        stored = self._layers[layer].index_select(0, rows)
        return stored if self._fp8 is None else self._fp8.dequantize(stored)

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
        """Fills `rows` with the entries of latents [T, rank] and keys [T, rotated]; the rows, [T, 1, elements]."""
        keys = keys.unsqueeze(1)
        if rotation is not None:
            keys = rotation.apply(keys)
        entries = torch.cat((latents.unsqueeze(1), keys), 2)
        stored = entries if self._fp8 is None else self._fp8.quantize(entries)
        self._layers[layer].index_copy_(0, rows, movable(stored).squeeze(1))
        return stored

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        entries = self.entries(layer, self.rows(slots)).unsqueeze(1)
        return entries, entries[:, :, : self.rank]
