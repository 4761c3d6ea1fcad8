"""Copies, as a driver that reads the arrays and structures of a call would make them."""

import ctypes
from typing import Any

import numpy as np
import pytest

from tandem.cache.kernels import copy_engine
from tandem.cache.plan.errors import DriverRefused

POINTER, IN_STREAM_ORDER, PREFER_OVERLAP = 1, 1, 1
STREAM = 7


class Driver:
    """calls: how many copies each batch had."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[int] = []

    def cuMemcpyBatchAsync(self, targets: int, sources: int, sizes: int, count: int, *options: Any) -> int:
        _, _, num_attributes, _, stream = options
        assert (num_attributes, stream) == (1, STREAM)
        rows = [np.frombuffer(ctypes.string_at(at, 8 * count), np.int64).tolist() for at in (targets, sources, sizes)]
        for target, source, size in zip(*rows, strict=True):
            ctypes.memmove(target, source, size)
        self.calls.append(count)
        return self.status

    def cuMemcpy3DBatchAsync(self, count: int, pointer: int, failed: Any, flags: int, stream: int) -> int:
        assert (flags, stream) == (0, STREAM)
        for words in np.frombuffer(ctypes.string_at(pointer, 112 * count), np.int64).reshape(count, 14).tolist():
            (kind, source, source_pitch), (_, target, target_pitch) = words[:3], words[5:8]
            width, height, depth, order = words[10:]
            assert (kind, depth, order) == (POINTER, 1, IN_STREAM_ORDER | PREFER_OVERLAP << 32)
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(copy_engine, "_driver", lambda: driver)
    return driver


@pytest.mark.parametrize("count", [1, 4, 5, 64, 301])
def test_each_copy_is_made_once(driver: Driver, count: int) -> None:
    random = np.random.default_rng(count)
    source = random.integers(0, 255, (400, 64), np.uint8)
    target = np.zeros_like(source)
    expected = target.copy()
    froms, tos, sizes = random.permutation(400)[:count], random.permutation(400)[:count], random.integers(1, 65, count)
    for begin, end, size in zip(froms, tos, sizes, strict=True):
        expected[end, :size] = source[begin, :size]
    copy_engine.copy_all(target.ctypes.data + tos * 64, source.ctypes.data + froms * 64, sizes, STREAM)
    assert np.array_equal(target, expected)
    assert sum(driver.calls) == count
    assert len(driver.calls) == sum(count > before for before in (0, 4, 20, 84))  # parts of 4, 16, 64, 256


def test_rows_go_to_where_they_stand_in_their_pages(driver: Driver) -> None:
    """Bytes 16 … 39 of two runs of 64-byte pages are copied."""
    source = np.random.default_rng(0).integers(0, 255, (9, 64), np.uint8)
    target = np.zeros_like(source)
    expected = target.copy()
    expected[4:7, 16:40], expected[1:2, 16:40] = source[0:3, 16:40], source[8:9, 16:40]
    sources = source.ctypes.data + 16 + np.array([0, 8]) * 64
    targets = target.ctypes.data + 16 + np.array([4, 1]) * 64
    copy_engine.copy_rows(targets, sources, np.array([3, 1], np.int32), 64, 24, STREAM)
    assert np.array_equal(target, expected)


def test_what_the_driver_refuses_is_an_error(driver: Driver) -> None:
    driver.status = 1
    page = np.zeros((2, 8), np.uint8)
    where = np.array([page.ctypes.data])
    with pytest.raises(DriverRefused, match="cuMemcpy3DBatchAsync failed with CUDA error 1"):
        copy_engine.copy_rows(where + 8, where, np.array([1], np.int32), 8, 8, STREAM)
