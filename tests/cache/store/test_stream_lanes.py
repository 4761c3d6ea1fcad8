"""Checks the copies that copy engines are asked for, and the pieces in which memory is pinned, with a driver that
copies at once."""

import ctypes
import gc
import weakref
from contextlib import nullcontext
from math import gcd

import numpy as np
import pytest
import torch

from tandem.cache.store import stream_lanes
from tandem.cache.store.copies import Moves
from tandem.cache.store.host_memory import OS_PAGE, PIECE_BYTES, HostMemory, pieces_of
from tandem.cache.store.stream_lanes import StreamLanes, stages_of
from tests.cache.store.pinning import Driver, pin_by


class Stream:
    cuda_stream = 7

    def __init__(self, *_: object) -> None:
        self.waited = list[object]()

    def wait_stream(self, stream: object) -> None:
        self.waited.append(stream)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.stream = stream


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    current = Stream()
    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)

    def copy_all(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        assert stream == Stream.cuda_stream
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(stream_lanes, "copy_all", copy_all)
    return current


def places(*of: int) -> np.ndarray:
    return np.array(of, np.int32)


def test_pages_go_down_whole_and_come_up_by_layers(current: Stream) -> None:
    """There are two groups; the second has one layer in the middle of the model."""
    pools = [torch.randn(5, 3, 4), torch.randn(4, 1, 6)]
    memory = [torch.zeros(count, pool[0].nbytes, dtype=torch.uint8) for count, pool in zip((6, 2), pools, strict=True)]
    lanes = StreamLanes(pools, memory, [(0, 2, 3), (1,)], [0, 1, 3])
    down = lanes.copy([Moves(0, places(4, 1), places(0, 5))], [], up=False)
    assert len(down.events) == 1
    assert torch.equal(memory[0][[0, 5]].view(torch.float32).view(2, 3, 4), pools[0][[4, 1]])
    lanes.copy([Moves(1, places(2), places(1))], [], up=False)
    before = [pool.clone() for pool in pools]
    up = lanes.copy([Moves(0, places(0), places(5)), Moves(1, places(3), places(1))], [down], up=True)
    assert len(up.events) == 3
    assert torch.equal(pools[0][0], before[0][1])
    assert torch.equal(pools[1][3], before[1][2])
    assert torch.equal(pools[0][1:], before[0][1:])
    assert vars(lanes._streams[1])["waited"] == [current]
    assert current.waited == [down.events[-1]]  # the stream that is current then is the lane's


def test_what_follows_has_one_end(current: Stream) -> None:
    pool = torch.randn(5, 3, 4)
    memory = [torch.zeros(6, pool[0].nbytes, dtype=torch.uint8)]
    lanes, done = StreamLanes([pool], memory, [(0, 1, 2)], [0, 1]), list[int]()
    copy = lanes.copy([], [], up=True, last=lambda: done.append(1))
    copy.wait(1)
    assert done == [1]
    assert current.waited == copy.events
    assert len(lanes.copy([Moves(0, places(1), places(1))], [], up=False, last=lambda: done.append(2)).events) == 1
    assert done == [1, 2]


@pytest.mark.usefixtures("current")
def test_memory_is_let_go_after_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes hold the pools and the memory, and end once their copies are done."""
    driver, pinned_at_ends = Driver(), list[int]()
    pin_by(driver, monkeypatch)
    monkeypatch.setattr(Stream, "synchronize", lambda _: pinned_at_ends.append(len(driver.pinned)))
    memory, pool = (
        HostMemory([4], [OS_PAGE], torch.device("cuda"), "cache.parked_bytes"),
        torch.randn(4, 1, OS_PAGE // 4),
    )
    memory.await_slot(0, 3)
    held = weakref.ref(pool)
    lanes = StreamLanes([pool], memory.shelves, [(0,)], [0])
    del memory, pool
    gc.collect()
    assert held() is not None
    assert driver.pinned
    lanes.copy([Moves(0, places(1), places(1))], [], up=False)
    assert not pinned_at_ends
    del lanes
    gc.collect()
    assert (pinned_at_ends, held(), driver.pinned) == ([1, 1], None, {})


@pytest.mark.parametrize(
    ("layers", "page_bytes", "begins"),
    [
        ([range(36)], [36 << 16], [0, 4, 9, 13, 18, 22, 27, 31]),
        ([range(36)], [300 << 10], [0, 18]),
        ([(0, 2), (1, 3)], [1 << 30, 1 << 20], [0, 1, 2, 3]),
        ([range(4)], [512], [0]),
    ],
)
def test_stages_are_even_and_not_too_small(layers: list[range], page_bytes: list[int], begins: list[int]) -> None:
    assert stages_of(layers, page_bytes) == begins


@pytest.mark.parametrize("slot_bytes", [2359296, 4096, 1000, 7, PIECE_BYTES + 4096])
@pytest.mark.parametrize("num_slots", [0, 1, 999])
def test_pieces_are_whole_slots_and_share_no_page(slot_bytes: int, num_slots: int) -> None:
    pieces = pieces_of(3, 8 * OS_PAGE, num_slots, slot_bytes)
    ends = [8 * OS_PAGE, *(piece.end for piece in pieces)]
    assert [piece.begin for piece in pieces] == ends[:-1]
    assert all(end % OS_PAGE == 0 for end in ends)
    assert [piece.slots for piece in pieces[-1:]] == [num_slots] * (num_slots > 0)
    for piece in pieces[:-1]:
        assert (piece.end - 8 * OS_PAGE) == piece.slots * slot_bytes
        assert piece.slots % (OS_PAGE // gcd(slot_bytes, OS_PAGE)) == 0
