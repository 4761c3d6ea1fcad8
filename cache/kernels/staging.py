"""Arrays at fixed addresses on a device, where a CUDA graph reads them, filled together from pinned memory."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes

ArraySize = tuple[int, torch.dtype]
"""Elements and type of one array."""


class Staging(Protocol):
    """Memory of one size on the host and on the device; several FixedArrays may take turns in it. Both are bytes."""

    host: Tensor
    on_device: Tensor

    def open(self) -> None:
        """Returns once the host's side may be written again; raises what the device reports."""
        ...

    def send(self, num_bytes: int) -> None:
        """The first num_bytes of the host's side are for work that is queued next."""
        ...

    def fetch(self, num_bytes: int) -> None:
        """Launches what brings num_bytes at most to the device's side, where send() does not; captured in a graph."""
        ...


class CopiedStaging:
    """Sends arrays by a copy on the current stream. open() waits until the previous copy is done."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def open(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, num_bytes: int) -> None:
        self.on_device[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def fetch(self, num_bytes: int) -> None:
        """Copies to the fixed addresses what send() has copied."""


class FixedArrays:
    """Arrays of given sizes, one after another from the staging's begin. tensors: theirs on the device.

    Only what fill() wrote, and what stands before it, is copied: put the array whose length varies most last.
    """

    def __init__(self, staging: Staging, sizes: Sequence[ArraySize]) -> None:
        self._staging = staging
        self._begins = _begins(sizes)
        views = list(zip(self._begins, sizes, strict=False))
        self._host_arrays = [_view(staging.host, begin, *size).numpy() for begin, size in views]
        self.tensors = [_view(staging.on_device, begin, *size) for begin, size in views]

    @staticmethod
    def num_bytes(sizes: Sequence[ArraySize]) -> int:
        return _begins(sizes)[-1]

    def fill(self, arrays: Sequence[NDArray[Any]]) -> None:
        """One array for each size, or for the first few, none longer; the rest of a longer array keeps what it held."""
        self.prepare(arrays)
        self.send()

    def open(self) -> None:
        """Returns once what was sent last is on the device."""
        self._staging.open()

    def prepare(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Does what fill() does before its last part, send()."""
        self._staging.open()
        self.put(0, arrays)
        last = len(arrays) - 1
        self._prepared = self._begins[last] + arrays[last].size * self._host_arrays[last].itemsize

    def put(self, first: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Replaces the prepared arrays, from index `first` on."""
        for host, array in zip(self._host_arrays[first:], arrays, strict=False):
            host[: array.size] = array

    def send(self) -> None:
        self._staging.send(self._prepared)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _begins(sizes: Sequence[ArraySize]) -> list[int]:
    """Returns the byte at which each array begins, and the end of the last one."""
    lengths = [aligned(count * dtype.itemsize) for count, dtype in sizes]
    return [0, *np.cumsum(lengths).tolist()]


def _view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[begin : begin + count * dtype.itemsize].view(dtype)
