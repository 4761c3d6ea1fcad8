"""A driver that pins the memory that a test says, for host memory of a GPU on a CPU."""

import threading

import pytest
import torch

from tandem.cache.store import host_memory

OS_PAGE = host_memory.OS_PAGE


class Driver:
    """Pins `most` pieces, and refuses more. It pins the first `early` ones at once, the others when `goes_on` is
    set."""

    def __init__(self, most: int = 99, early: int = 99) -> None:
        self.pinned: dict[int, int] = {}
        self.goes_on = threading.Event()
        self._most, self._early = most, early

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        if len(self.pinned) == self._early:
            self.goes_on.wait()
        if len(self.pinned) == self._most:
            return 2
        assert not any(address < begin + taken and begin < address + size for begin, taken in self.pinned.items())
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def pin_by(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory of GPUs is pinned by the driver, in pieces of 4 pages of the system."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4 * OS_PAGE)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
