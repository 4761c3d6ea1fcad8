"""Copies between places that one GPU can address, by its copy engines: calls to the driver, with addresses.

The driver's time for a call is the host's; the engine begins with a call's copies when it returns, and pauses before
those of the next one. So a long list is handed over in parts that grow, each as large as the engine gives time for.
"""

import ctypes
import time
from functools import cache

import numpy as np

from tandem.cache.position_map import Int32Array
from tandem.cache.window import Int64Array
from tandem.transfer.errors import TransportError

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy engines, not multiprocessors
FIRST_BATCH, LEAST_GROWTH = 4, 1.5
ENGINE_RATE = 400e9  # bytes/s, NVLink 4's: behind a slower link an engine only has more to do meanwhile
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
    """Copies sizes[i] bytes from address sources[i] to targets[i], all on a CUDA stream, in any order.

    The source is read in stream order. stream: a handle, not the default stream's. TransportError when the driver
    refuses, or is older than CUDA 12.8.
    """
    arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
    begin, count, busy_until = 0, FIRST_BATCH, 0.0
    while begin < sizes.size:
        count = min(count, sizes.size - begin)
        called = time.perf_counter()
        _copy_batch(arrays, begin, count, stream)
        returned = time.perf_counter()
        busy_until = max(busy_until, returned) + int(sizes[begin : begin + count].sum()) / ENGINE_RATE
        begin += count
        in_time = count * (busy_until - returned) / (returned - called)
        count = max(int(count * LEAST_GROWTH), int(in_time))


def copy_rows(
    targets: Int64Array, sources: Int64Array, counts: Int32Array, pitch: int, width: int, stream: int
) -> None:
    """As copy_all, in one batch, each copy of counts[i] rows of `width` bytes, which stand `pitch` bytes apart on both
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


def _copy_batch(arrays: tuple[int, int, int], begin: int, count: int, stream: int) -> None:
    """arrays: the addresses of targets, sources and sizes, of which entries begin … begin + count - 1 go."""
    targets, sources, sizes = (address + 8 * begin for address in arrays)
    attributes, first, failed = ctypes.byref(ATTRIBUTES), ctypes.byref(FOR_ALL), ctypes.byref(ctypes.c_size_t(0))
    status = _driver().cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, first, 1, failed, stream)
    _check("cuMemcpyBatchAsync", status)


def _check(name: str, status: int) -> None:
    if status:
        raise TransportError(f"{name} failed with CUDA error {status}")


@cache
def _driver() -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemcpyAsync.argtypes = [pointer, pointer, size, pointer]
        driver.cuMemcpyBatchAsync.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
        driver.cuMemcpy3DBatchAsync.argtypes = [size, pointer, pointer, ctypes.c_ulonglong, pointer]
    except (OSError, AttributeError) as error:
        raise TransportError(f"the CUDA driver cannot be used: {error}; it must be of CUDA 12.8 or later") from None
    return driver
