"""The pages and the mailbox of this PE, as the threads of connections fill them."""

import secrets
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.transfer.copy_plan import check_slots
from tandem.transfer.errors import TransportError
from tandem.transfer.membership import TransportConfig
from tandem.transfer.page_pool import ALL_OF_THEM, PagePool
from tandem.transfer.regions import Region
from tandem.transfer.segment import TOKEN_BYTES, create_private_segment
from tandem.transfer.tcp.frames import Kind


class PageMemory:
    """Pools and mailbox. What comes from a peer is checked here against the sizes of the pools.

    bytes: of each pool, page by page; of none on a GPU.
    """

    def __init__(self, config: TransportConfig, pools: tuple[Tensor, ...] = ()) -> None:
        """pools: zeroed, as the layout wants them; without them they are a private segment."""
        self.layout = config.layout
        self.regions = config.regions  # of each PE
        self.num_signals = config.num_signals
        self._num_pages = config.num_pages
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.tensors = pools or create_private_segment(config).pools
        self.pools = [PagePool(pool) for pool in self.tensors]
        self.bytes = [bytes_of(pool) for pool in self.tensors if not pool.is_cuda]
        self._mailbox = np.zeros((config.num_signals, 2), np.int64)
        self._mail = threading.Lock()

    def page_views(self, group: int, runs: NDArray[np.int32]) -> Iterator[memoryview]:
        """The bytes of runs, int32 [n, 2], of (page, how many). TransportError, before the first, if one is outside."""
        first, count = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
        if int(first.min()) < 0 or int(count.min()) < 1 or int((first + count).max()) > self._num_pages[group]:
            raise TransportError(f"runs of pages {runs.tolist()[:4]} …; pages 0 … {self._num_pages[group] - 1} exist")
        size, pages = self.layout.page_bytes(group), self.bytes[group]
        return (pages[begin * size : (begin + length) * size] for begin, length in runs.tolist())

    def check_slots(self, group: int, slots: NDArray[np.int32]) -> None:
        """Raises TransportError if a slot is outside."""
        try:
            check_slots("slots", slots, self._num_pages[group] * self.layout.paging[group].entries)
        except ValueError as error:
            raise TransportError(str(error)) from error

    def put(
        self, kind: Kind, group: int, layer: int, slots: Tensor, values: Tensor, region: Region | None = None
    ) -> None:
        """Writes a frame of slots or tokens to its slots (int64 [n]). region: of the sender's shard."""
        pool, of = self.pools[group], self.layout.groups[group]
        layers, heads, row = len(of.layers), of.num_kv_heads, self.layout.page_shape(group)[-1]
        if region is not None:
            layers, heads, row = region.num_layers, region.num_heads, region.count_numbers(row)
        if kind == Kind.TOKENS:
            planes = values.view(of.planes, slots.shape[0], heads, row)
            where = ALL_OF_THEM if region is None else region.heads
            pool.put_tokens(layer, slots, planes[0], planes[1] if of.planes == 2 else None, where)
        else:
            shape = (slots.shape[0], layers, of.planes, heads, row)
            pool.put_slots(slots, pool.elements(values).view(shape), region)

    def post(self, row: int, signal: int, payload: int) -> None:
        with self._mail:
            self._mailbox[row] = (signal, payload)

    def mailbox(self) -> Int64Array:
        """Returns a copy."""
        with self._mail:
            return self._mailbox.copy()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
