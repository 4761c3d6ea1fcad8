"""Copies, as a driver that reads the arrays and structures of a call would make them."""

import ctypes
from typing import Any

import numpy as np
import pytest

from tandem.transfer import copy_engine
from tandem.transfer.errors import TransportError

POINTER, IN_STREAM_ORDER, PREFER_OVERLAP = 1, 1, 1
STREAM = 7


class Driver:
    """calls: how many copies each batch had. seconds: what a call takes, and each of its copies, by `now`."""

    def __init__(self) -> None:
        self.status = 0
        self.moves = True
        self.calls: list[int] = []
        self.now = 0.0
        self.seconds = 5e-6, 1e-6
        self.idle = 0.0  # how long an engine that moves ENGINE_RATE had nothing to do after its first copy
        self._busy_until: float | None = None

    def cuMemcpyBatchAsync(self, targets: int, sources: int, sizes: int, count: int, *options: Any) -> int:
        _, _, num_attributes, _, stream = options
        assert (num_attributes, stream) == (1, STREAM)
        rows = [np.frombuffer(ctypes.string_at(at, 8 * count), np.int64).tolist() for at in (targets, sources, sizes)]
        if self.moves:
            for target, source, size in zip(*rows, strict=True):
                ctypes.memmove(target, source, size)
        self.calls.append(count)
        self.now += self.seconds[0] + self.seconds[1] * count
        if self._busy_until is not None:
            self.idle += max(0.0, self.now - self._busy_until)
        began = self.now if self._busy_until is None else max(self.now, self._busy_until)
        self._busy_until = began + sum(rows[2]) / copy_engine.ENGINE_RATE
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
    monkeypatch.setattr(copy_engine.time, "perf_counter", lambda: driver.now)
    return driver


@pytest.mark.parametrize("count", [0, 1, 4, 5, 64, 301])
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


@pytest.mark.parametrize(("of_call", "of_copy"), [(5e-6, 0.6e-6), (2e-6, 3.4e-6), (6e-6, 2.5e-6)])
def test_the_engine_always_has_something_to_do(driver: Driver, of_call: float, of_copy: float) -> None:
    """Pages of 2.25 MiB, for which it takes 6 µs each, by drivers quick and slow."""
    driver.moves, driver.seconds = False, (of_call, of_copy)
    pages = np.arange(64)
    copy_engine.copy_all(pages, pages, np.full(64, 36 << 16), STREAM)
    assert driver.idle == 0
    assert len(driver.calls) <= 6


def test_a_slow_driver_is_called_a_few_times_only(driver: Driver) -> None:
    """Where the engine is done before the next call returns, whatever its size, parts grow all the same."""
    driver.moves, driver.seconds = False, (50e-6, 10e-6)
    pages = np.arange(2048)
    copy_engine.copy_all(pages, pages, np.full(2048, 1 << 20), STREAM)
    assert len(driver.calls) <= 16


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
