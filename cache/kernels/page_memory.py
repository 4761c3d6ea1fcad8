"""Pages and slots of a pool that are moved, whatever their entries are: all backends do this alike."""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kv_scales import FP8


def movable(tensor: Tensor) -> Tensor:
    """The same memory, as bytes where its elements are 8-bit floats, which torch and NVSHMEM cannot always move."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


class PageOperations(ABC):
    """Moves the pages of one pool `[num_pages, layers, planes, num_kv_heads, page_size, elements]`."""

    def __init__(self, pool: Tensor) -> None:
        self._words = movable(pool)
        self._pages = _widened(pool)

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        """Copies all layers of pages sources[i] to targets[i], int32 [n] each."""
        source, target = upload([sources.astype(np.int64), targets.astype(np.int64)], self._words.device)
        self._pages.index_copy_(0, target, self._pages.index_select(0, source))

    def move_slots(self, sources: Int32Array, targets: Int32Array) -> None:
        """All layers of slots sources[i] to targets[i], int32 [n] each; a target may be the source of another move,
        which still moves what was there before."""
        slots = np.concatenate((sources, targets)).astype(np.int64)
        pages, offsets = upload(list(np.divmod(slots, self._words.shape[4])), self._words.device)
        count = sources.size
        moved = self._words[pages[:count], :, :, :, offsets[:count]]
        self._words[pages[count:], :, :, :, offsets[count:]] = moved

    def clear_pages(self, pages: Int32Array) -> None:
        """Makes sure that what stands in slots not yet written cannot reach an output (0 · NaN is NaN)."""
        (index,) = upload([pages.astype(np.int64)], self._words.device)
        self._pages.index_fill_(0, index, 0)

    def compute_again(self, sequence: int, count: int, source: int, target: int) -> None:
        """Gives page `target` the state after the first `count` new tokens of a sequence, in a group that keeps states.
        `sequence` is its place in the last forward with drafts. Page `source` has the state before them."""
        raise NotImplementedError(f"{type(self).__name__} keeps no states")

    @abstractmethod
    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Copies of k and v [n, num_kv_heads, head_dim] at `slots`, int32 [n], in the dtype in which they came.

        Of latents: whole entries [n, 1, rank + rotated], and their latents [n, 1, rank].
        """


def _widened(pool: Tensor) -> Tensor:
    """Returns the pool as [num_pages, numbers of a page]. They are int64 where these fill a page, because each
    number costs a GPU the same."""
    pages = pool.view(torch.uint8).view(pool.shape[0], -1)
    return pages.view(torch.int64) if pages.shape[1] % 8 == 0 else pages
