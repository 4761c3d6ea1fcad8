"""Writing into a pool of pages that this process can address: its own, or a mapped peer's."""

import torch
from torch import Tensor

from tandem.cache.kernels.page_memory import movable
from tandem.transfer.copy_plan import CopyPlan


class PagePool:
    """One pool `[num_pages, layers, planes, num_kv_heads, page_size, head_dim]`, seen as rows of head_dim elements.

    The row of a slot's K at (layer, head) is page · page_rows + (layer · planes · heads + head) · page_size + offset;
    V, where there are two planes, stands heads · page_size rows further.
    """

    def __init__(self, pool: Tensor) -> None:
        _, layers, planes, heads, page_size, head_dim = pool.shape
        self.pool = pool
        self._pages = movable(pool)
        self._rows = self._pages.view(-1, head_dim)
        self._head_dim = head_dim
        self._page_size = page_size
        self._page_rows = layers * planes * heads * page_size
        self._planes = planes
        self._value_rows = heads * page_size
        layer_rows = torch.arange(layers, device=pool.device)[:, None] * (planes * self._value_rows)
        self._key_rows = layer_rows + torch.arange(heads, device=pool.device) * page_size  # [layers, heads]

    def put_tokens(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """k and v [n, heads, head_dim], contiguous, to slots (int64 [n]) of one layer. IndexError outside the pool.

        v is None exactly where there is one plane.
        """
        assert (v is None) == (self._planes == 1)
        pages = slots.div(self._page_size, rounding_mode="floor")
        first = torch.add(slots, pages, alpha=self._page_rows - self._page_size)
        rows = (first[:, None] + self._key_rows[layer]).view(-1)
        self._rows.index_copy_(0, rows, movable(k).view(-1, self._head_dim))
        if v is not None:
            self._rows.index_copy_(0, rows + self._value_rows, movable(v).view(-1, self._head_dim))

    def elements(self, values: Tensor) -> Tensor:
        """The same memory, in the elements in which this pool is moved."""
        return movable(values)

    def read_slots(self, slots: Tensor) -> Tensor:
        """A copy of slots (int64 [n]), all layers: [n, layers, planes, num_kv_heads, head_dim]."""
        return self._pages[slots // self._page_size, :, :, :, slots % self._page_size]

    def put_slots(self, slots: Tensor, values: Tensor) -> None:
        """What read_slots() of a like pool gave, to slots (int64 [n])."""
        self._pages[slots // self._page_size, :, :, :, slots % self._page_size] = values

    def copy_slots(self, source: "PagePool", source_slots: Tensor, target_slots: Tensor) -> None:
        """Single slots from `source`, all layers; both int64 [n]."""
        self.put_slots(target_slots, source.read_slots(source_slots))

    def copy(self, source: "PagePool", plan: CopyPlan) -> None:
        """All of a plan. Its slots must lie inside both pools."""
        runs = zip(plan.source_pages.tolist(), plan.target_pages.tolist(), plan.num_pages.tolist(), strict=True)
        for source_page, target_page, num_pages in runs:
            self._pages[target_page : target_page + num_pages] = source._pages[source_page : source_page + num_pages]
        if plan.source_slots.size:
            slots = (torch.from_numpy(slots).long() for slots in (plan.source_slots, plan.target_slots))
            self.copy_slots(source, *slots)
