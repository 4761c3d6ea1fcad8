"""Writing into a pool of pages that this process can address: its own, or a mapped peer's."""

import torch
from torch import Tensor

from tandem.cache.kernels.page_memory import movable
from tandem.transfer.copy_plan import CopyPlan
from tandem.transfer.regions import ALL_OF_THEM, Region

WHOLE_PAGES = Region(ALL_OF_THEM, ALL_OF_THEM, ALL_OF_THEM, ALL_OF_THEM)


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

    def put_tokens(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None, heads: slice = ALL_OF_THEM) -> None:
        """k and v [n, heads, head_dim], contiguous, to slots (int64 [n]) of one layer. IndexError outside the pool.

        v is None exactly where there is one plane. heads: those that k and v are for.
        """
        assert (v is None) == (self._planes == 1)
        pages = slots.div(self._page_size, rounding_mode="floor")
        first = torch.add(slots, pages, alpha=self._page_rows - self._page_size)
        rows = (first[:, None] + self._key_rows[layer, heads]).view(-1)
        self._rows.index_copy_(0, rows, movable(k).view(-1, self._head_dim))
        if v is not None:
            self._rows.index_copy_(0, rows + self._value_rows, movable(v).view(-1, self._head_dim))

    def elements(self, values: Tensor) -> Tensor:
        """Views values in the elements in which this pool is moved."""
        return movable(values)

    def read_slots(self, slots: Tensor, region: Region | None = None) -> Tensor:
        """Copies slots (int64 [n]), whole or a region: [n, layers, planes, heads, head_dim or fewer]."""
        of, pages, offsets = region or WHOLE_PAGES, slots // self._page_size, slots % self._page_size
        parts = [self._pages[..., numbers][pages, of.layers, :, of.heads, offsets] for numbers in of.numbers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def put_slots(self, slots: Tensor, values: Tensor, region: Region | None = None) -> None:
        """Writes values to slots (int64 [n]). They come from read_slots() of a like pool, or of a region of a
        peer's."""
        of, pages, offsets = region or WHOLE_PAGES, slots // self._page_size, slots % self._page_size
        begin = 0
        for numbers in of.numbers:
            target = self._pages[..., numbers]
            end = begin + target.shape[-1]
            target[pages, of.layers, :, of.heads, offsets] = values[..., begin:end]
            begin = end

    def copy(self, source: "PagePool", plan: CopyPlan, region: Region | None = None) -> None:
        """Copies all of a plan. Its slots must lie inside both pools. region: of the source's pages; None: whole
        pages."""
        if region is not None and region.is_empty:
            return
        own = None if region is None else region.reversed
        runs = zip(plan.source_pages.tolist(), plan.target_pages.tolist(), plan.num_pages.tolist(), strict=True)
        for source_page, target_page, num_pages in runs:
            pages, source_pages = self._pages[target_page:][:num_pages], source._pages[source_page:][:num_pages]
            if region is None:
                pages.copy_(source_pages)
                continue
            for numbers, of_source in zip(region.peer_numbers, region.numbers, strict=True):
                part = source_pages[:, region.layers, :, region.heads, :, of_source]
                pages[:, region.peer_layers, :, region.peer_heads, :, numbers].copy_(part)
        if plan.source_slots.size:
            arrays = (torch.from_numpy(slots).long() for slots in (plan.source_slots, plan.target_slots))
            slots, targets = (array.to(self.pool.device) for array in arrays)
            self.put_slots(targets, source.read_slots(slots, region), own)


def rows_for(k: Tensor, v: Tensor | None, token_indices: Tensor, region: Region | None) -> tuple[Tensor, Tensor | None]:
    """Rows token_indices of k and v [num_tokens, num_kv_heads, head_dim], of the heads of a region; contiguous."""
    assert region is None or region.numbers == (ALL_OF_THEM,), "states go by slots"

    def rows_of(plane: Tensor) -> Tensor:
        rows = plane.index_select(0, token_indices)
        return rows if region is None else rows[:, region.heads].contiguous()

    return rows_of(k), None if v is None else rows_of(v)
