"""Copies between addresses that one GPU can reach, by its copy engines, through the driver.

A call costs the host the driver's time. An engine starts with a call's first copy, and pauses a few µs between two
calls. So a long list of copies is handed over in few parts that grow.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array, address_of
from tandem.cache.plan.errors import DriverRefused

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, not multiprocessors
FIRST_BATCH, GROWTH = 4, 4
# A CUDA_MEMCPY3D_BATCH_OP in words of 8 bytes: two operands (type, address, bytes of a row, rows of a layer, hint),
# three extents, access order and flags.
WORDS_OF_OPERAND, WORDS_OF_ROWS = 5, 14
BY_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


ATTRIBUTES = _Attributes(IN_STREAM_ORDER, (0, 0), (0, 0), OVERLAP_WITH_COMPUTE)
FOR_ALL = ctypes.c_size_t(0)  # the first copy from which the attributes hold


def copy_all(targets: Int64Array, sources: Int64Array, sizes: Int64Array, stream: int) -> None:
    """Copies sizes[i] bytes from address sources[i] to targets[i], one or more, all on a CUDA stream, in any order.

    The source is read in stream order. stream: a handle, not the default stream's. DriverRefused when the driver
    refuses, or is older than CUDA 12.8.
    """
    arrays = address_of(targets), address_of(sources), address_of(sizes)
    begin, count = 0, FIRST_BATCH
    while begin < sizes.size:
        _copy_batch(arrays, begin, min(count, sizes.size - begin), stream)
        begin, count = begin + count, count * GROWTH


def copy_rows(
    targets: Int64Array, sources: Int64Array, counts: Int32Array, pitch: int, width: int, stream: int
) -> None:
    """Copies like copy_all, in one batch. Copy i has counts[i] rows of `width` bytes, `pitch` bytes apart on both
    sides."""
    copies, failed = np.zeros((targets.size, WORDS_OF_ROWS), np.int64), ctypes.c_size_t(0)
    for operand, addresses in ((copies, sources), (copies[:, WORDS_OF_OPERAND:], targets)):
        operand[:, 0], operand[:, 1], operand[:, 2] = BY_POINTER, addresses, pitch
    copies[:, -4], copies[:, -3], copies[:, -2] = width, counts, 1
    copies[:, -1] = IN_STREAM_ORDER | OVERLAP_WITH_COMPUTE << 32
    status = _driver().cuMemcpy3DBatchAsync(targets.size, copies.ctypes.data, ctypes.byref(failed), 0, stream)
    _check("cuMemcpy3DBatchAsync", status)


def copy(target: int, source: int, size: int, stream: int) -> None:
    """Copies `size` bytes on a CUDA stream; either side may be pinned host memory."""
    _check("cuMemcpyAsync", _driver().cuMemcpyAsync(target, source, size, stream))


def _copy_batch(arrays: Sequence[int], begin: int, count: int, stream: int) -> None:
    """Copies entries begin … begin + count - 1. arrays: the addresses of targets, sources and sizes."""
    targets, sources, sizes = (address + 8 * begin for address in arrays)
    attributes, first, failed = ctypes.byref(ATTRIBUTES), ctypes.byref(FOR_ALL), ctypes.byref(ctypes.c_size_t(0))
    status = _driver().cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, first, 1, failed, stream)
    _check("cuMemcpyBatchAsync", status)


def _check(name: str, status: int) -> None:
    if status:
        raise DriverRefused(f"{name} failed with CUDA error {status}")


@cache
def _driver() -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemcpyAsync.argtypes = [pointer, pointer, size, pointer]
        driver.cuMemcpyBatchAsync.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
        driver.cuMemcpy3DBatchAsync.argtypes = [size, pointer, pointer, ctypes.c_ulonglong, pointer]
    except (OSError, AttributeError) as error:
        raise DriverRefused(f"the CUDA driver cannot be used: {error}; it must be of CUDA 12.8 or later") from None
    return driver
