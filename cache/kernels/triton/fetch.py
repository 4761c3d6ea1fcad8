"""Copies a step's arrays to the addresses where the step reads them, and reports to the host that they are read."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv

BLOCK, WARPS = 512, 8  # int64 numbers of a program at a time: 16 bytes a thread
MOST_PROGRAMS = 64


def fetch(arrived: Tensor, on_device: Tensor, finished: Tensor, fetched: Tensor) -> None:
    """The first numbers that arrived go to on_device, and then the number of their filling to fetched.

    arrived: int64 [2 + m], of whole 16 bytes: filling, how many pairs of numbers there are, then these. on_device:
    int64 [n], as many at least. finished: int32 [1], zero before and after. fetched: int64 [1], pinned.
    """
    programs = min(cdiv(on_device.shape[0], BLOCK), MOST_PROGRAMS)
    kernel: Any = _fetch[(programs,)]
    kernel(arrived, on_device, finished, fetched, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _fetch(arrived, on_device, finished, fetched, BLOCK: tl.constexpr):
    filling = tl.load(arrived)
    count = 2 * tl.load(arrived + 1)
    for begin in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK)
        tl.store(on_device + index, tl.load(arrived + 2 + index, mask=index < count), mask=index < count)
    tl.debug_barrier()  # all threads have read before one reports it
    if tl.atomic_add(finished, 1) == tl.num_programs(0) - 1:
        tl.store(finished, 0)
        tl.store(fetched, filling, cache_modifier=".wt")
