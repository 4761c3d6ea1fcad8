"""Rows of a strided copy, as a driver that reads its structure would move them."""

import ctypes
from typing import Any

import numpy as np
import pytest

from tandem.transfer import copy_engine
from tandem.transfer.errors import TransportError

POINTER, IN_STREAM_ORDER, PREFER_OVERLAP = 1, 1, 1
STREAM = 7


class Driver:
    def __init__(self) -> None:
        self.status = 0

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


def test_rows_go_to_where_they_stand_in_their_pages(driver: Driver) -> None:
    """Two runs of pages of 64 bytes, of which bytes 16 … 39 go."""
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
    with pytest.raises(TransportError, match="cuMemcpy3DBatchAsync failed with CUDA error 1"):
        copy_engine.copy_rows(where + 8, where, np.array([1], np.int32), 8, 8, STREAM)
