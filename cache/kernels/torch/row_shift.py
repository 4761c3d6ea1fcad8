"""Rows that stand elsewhere in their sequences than was planned: drafts of the step before did not hold."""

from torch import Tensor

from tandem.cache.kernels.base import DeviceTables


def shift_rows(tables: DeviceTables, shift: Tensor, page_size: int) -> None:
    """Row i ends shift[i] positions earlier (int32 [T]), or later where that is negative, but never after the end that
    was planned. On the device, in place: its slot and its length.

    kv_last_page_len may then be 0 or less: a row has (pages - 1) · page_size + kv_last_page_len positions, whatever
    its sign. The pages that the row no longer reaches stay in its list, and nobody reads them.
    """
    last = tables.kv_last_page_len - shift
    back = (last - 1).div(page_size, rounding_mode="floor")  # from the last page of the list; negative or 0
    pages = tables.kv_indices[(tables.kv_indptr[1:] - 1 + back).long()]
    slots = (pages - back) * page_size + last - 1
    tables.slots.copy_(slots.where(shift != 0, tables.slots))
    tables.kv_last_page_len.copy_(last)
