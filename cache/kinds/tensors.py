"""Checks tensors that callers give, before a kernel sees them."""

import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument


def check_tensor(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """InvalidArgument, which calls x `name`, unless x has this shape, dtype and device, and a last stride of 1."""
    if x is None:
        raise InvalidArgument(f"{name} is None; it must be {shape} of {dtype} on {device}")
    if x.shape != shape or x.dtype is not dtype or x.device != device or x.stride(-1) != 1:
        raise InvalidArgument(
            f"{name} is {tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}; it must be {shape} of "
            f"{dtype} on {device} with a last stride of 1"
        )
