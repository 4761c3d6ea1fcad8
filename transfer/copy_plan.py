"""Plans the whole pages and the single slots to copy, so that copies are as long as they can be."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.cache.kernels.build.native_build import load_short_calls
from tandem.cache.plan.arrays import Int32Array, address_of
from tandem.cache.plan.errors import InvalidArgument

SOURCE = Path(__file__).with_name("page_runs.c")


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copies from one pool to another; together they cover each slot pair once.

    source_pages, target_pages, num_pages: int32 [r]; run i copies num_pages[i] consecutive pages.
    source_slots, target_slots: int32 [s]; what does not make whole pages.
    """

    source_pages: Int32Array
    target_pages: Int32Array
    num_pages: Int32Array
    source_slots: Int32Array
    target_slots: Int32Array


def plan_copy(source_slots: Int32Array, target_slots: Int32Array, page_size: int, num_slots: int) -> CopyPlan:
    """Plans source_slots[i] → target_slots[i] (int32 [n] each, none skipped) between pools of num_slots; target slots
    must be distinct. InvalidArgument for a slot outside."""
    if source_slots.shape != target_slots.shape or source_slots.ndim != 1:
        raise InvalidArgument(
            f"source_slots has shape {source_slots.shape} and target_slots {target_slots.shape}; both must be [n]"
        )
    count = source_slots.size
    if not count:
        empty = np.empty(0, np.int32)
        return CopyPlan(empty, empty, empty, empty, empty)
    head = count - count % page_size
    whole_pages = _runs_of_pages(source_slots[:head], target_slots[:head], page_size, num_slots)
    unchecked = 0 if whole_pages is None else head
    check_slots("source_slots", source_slots[unchecked:], num_slots)
    check_slots("target_slots", target_slots[unchecked:], num_slots)
    if whole_pages is not None:
        return CopyPlan(*whole_pages, source_slots[head:], target_slots[head:])
    begins, lengths = _runs(source_slots, target_slots)
    # Whole pages exist where both sides stand at the same offset; `lead` slots come before the first of them.
    lead = -source_slots[begins] % page_size
    aligned = (source_slots[begins] - target_slots[begins]) % page_size == 0
    whole = np.where(aligned, np.maximum(lengths - lead, 0) // page_size, 0)
    runs = np.flatnonzero(whole)
    first, num_pages = (begins + lead)[runs], whole[runs].astype(np.int32)
    single = _outside(first, num_pages * page_size, count)
    return CopyPlan(
        source_slots[first] // page_size,
        target_slots[first] // page_size,
        num_pages,
        source_slots[single],
        target_slots[single],
    )


def check_slots(field: str, slots: Int32Array, num_slots: int) -> None:
    """InvalidArgument for slots (int32 [n]) outside a pool."""
    if slots.size and int(slots.view(np.uint32).max()) >= num_slots:  # negative ones become large
        raise InvalidArgument(
            f"{field} are {int(slots.min())} … {int(slots.max())}; they must be from 0 to {num_slots - 1}"
        )


def _runs_of_pages(
    source: Int32Array, target: Int32Array, page_size: int, num_slots: int
) -> tuple[Int32Array, Int32Array, Int32Array] | None:
    """source_pages, target_pages and num_pages of a CopyPlan, where all is whole pages inside: the usual case, quickly.
    None where it is not, or page_runs.c cannot be built."""
    find, num_pages = load_page_runs(), source.size // page_size
    if find is None or not num_pages:
        return None
    slots = np.concatenate((source, target), dtype=np.int32)
    runs = np.empty((3, num_pages), np.int32)
    count = find(num_pages, page_size, num_slots, address_of(slots), address_of(runs))
    return None if count < 0 else (runs[0, :count], runs[1, :count], runs[2, :count])


@cache
def load_page_runs() -> Callable[..., int] | None:
    """page_runs.c's function, compiled where it is not there yet; None where it cannot be."""
    library = load_short_calls(SOURCE)
    if library is None:
        return None
    find = library.page_runs
    find.argtypes = (ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    find.restype = ctypes.c_int64
    return find


def _runs(source: Int32Array, target: Int32Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (begins, lengths) of the stretches in which both arrays go on by 1. They have at least one element
    each."""
    broken = (source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)
    edges = np.concatenate(([0], broken.nonzero()[0] + 1, [source.size]))
    return edges[:-1], edges[1:] - edges[:-1]


def _outside(begins: NDArray[np.integer], lengths: Int32Array, count: int) -> NDArray[np.int64]:
    """Returns the numbers of 0 … count-1 that no run (begin, length) holds. Runs ascend and do not overlap."""
    edges = np.zeros(count + 1, np.int8)
    edges[begins] += 1
    edges[begins + lengths] -= 1
    return np.flatnonzero(np.cumsum(edges[:-1]) == 0)
