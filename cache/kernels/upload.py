"""Index arrays of one step, from the host to a device in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each of `arrays` (any shape and dtype) as a tensor on `device`; on a CPU they are the arrays themselves.

    The copy is ordered on the current stream and does not wait for it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([_padded(array.nbytes) for array in arrays])
    # torch gives pinned memory out again only when the copies from it are done.
    packed = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for array, end in zip(arrays, ends.tolist(), strict=True):
        begin = end - _padded(array.nbytes)
        host[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = packed.to(device, non_blocking=True)
    return [
        on_device[end - _padded(array.nbytes) :][: array.nbytes].view(_torch_dtype(array)).reshape(array.shape)
        for array, end in zip(arrays, ends.tolist(), strict=True)
    ]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _torch_dtype(array: NDArray[np.generic]) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
