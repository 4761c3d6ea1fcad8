"""Entries that layers keep in addition to those they attend to, stored with torch operations on any device."""

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Appended, AttentionBackend, Capabilities, Entries, GroupPlan
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, IntArray
from tandem.cache.plan.tables import PageTables, TokenLayout


class TorchEntryKernels(AttentionBackend[Entries]):
    """An EntryBackend. own, what plan() returns, is the page and the place in it of each new entry, int64 [2, n]. Graph
    buffers are for kernels by token, which read the tables."""

    capabilities = Capabilities(step_graphs=True, verify_graphs=True)

    def __init__(self, pool: Tensor) -> None:
        super().__init__(pool)
        self.pool = pool

    def clear_pages(self, pages: Int32Array) -> None:
        """Nothing: an entry is read when it has been stored, and by its own slot."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> Tensor:
        return places_of(self.pool, tables.slot_mapping)

    def run(self, plan: GroupPlan, layer: int, x: Entries, appended: Appended | None = None) -> Tensor:
        pages, places = plan.own
        for plane, values in enumerate(x):
            if values is not None:
                self.pool[pages, layer, plane, :, places] = values
        if appended is not None:
            appended(*x)
        return x.k

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Reads slots of the pool. With one plane, k and v are equal."""
        return entries_at(self.pool, layer, places_of(self.pool, slots))


def entries_at(pool: Tensor, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [n, num_heads, head_dim] at `places`, of places_of(). With one plane, they are the same."""
    pages, offsets = places
    read = [pool[pages, layer, plane, :, offsets] for plane in range(pool.shape[2])]
    return read[0], read[-1]


def places_of(pool: Tensor, slots: IntArray) -> Tensor:
    """int64 [2, n]: the page of each slot (int [n]), and the place in it."""
    size, both = pool.shape[4], np.empty((2, slots.size), np.int64)
    both[0] = pages = slots // size
    both[1] = slots - pages * size
    return torch.from_numpy(both) if pool.device.type == "cpu" else upload([both], pool.device)[0]
