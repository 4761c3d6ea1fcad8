"""Programmatic dependent launch (CUDA, from compute capability 9.0): a kernel starts while the one before it ends.

A kernel launched so has PDL true. It says early that its successor may start, and waits, before it touches anything
that earlier work writes, until all of that is done and visible. In a chain of short kernels the start of each then
costs nothing; a weight may be fetched before the wait.
"""

from functools import lru_cache
from typing import Any

import torch


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keywords for the launch of a Triton kernel with a constexpr PDL."""
    return {"PDL": True, "launch_pdl": True} if _is_there(device) else {"PDL": False}


@lru_cache
def _is_there(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
