"""Rows that stand elsewhere in their sequences than was planned, in one kernel."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.sizes import cdiv

BLOCK = 128


def shift_rows(tables: DeviceTables, shift: Tensor, page_size: int) -> None:
    """See tandem.cache.kernels.torch.row_shift."""
    rows = shift.shape[0]
    kernel: Any = _shift[(cdiv(rows, BLOCK),)]
    kernel(
        slots=tables.slots,
        indptr=tables.kv_indptr,
        last_page_len=tables.kv_last_page_len,
        indices=tables.kv_indices,
        shift=shift,
        rows=rows,
        page_size=page_size,
        BLOCK=BLOCK,
    )


@triton.jit
def _shift(slots, indptr, last_page_len, indices, shift, rows, page_size, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    by = tl.load(shift + row, mask=row < rows, other=0)
    moves = by != 0
    last = tl.load(last_page_len + row, mask=moves, other=1) - by
    back = (page_size - last) // page_size  # whole pages before the last one of the list; last is at most page_size
    end = tl.load(indptr + row + 1, mask=moves, other=1)
    page = tl.load(indices + end - 1 - back, mask=moves, other=0)
    tl.store(slots + row, (page + back) * page_size + last - 1, mask=moves)
    tl.store(last_page_len + row, last, mask=moves)
