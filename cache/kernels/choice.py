"""Chooses the kernels for a pool of K and V. Other kinds of state choose theirs: see tandem.cache.kinds."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import FLASHINFER_HEAD_DIMS, DeviceTables
from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.gpu_limits import check_sizes, head_sizes
from tandem.cache.kernels.native.crew import load_crew
from tandem.cache.kernels.native.kernels import SOURCE, NativeKernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kernels.torch.row_shift import shift_rows


def _triton(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Makes Triton's kernels for 16 bits on a GPU, for heads that FlashInfer has no kernels for. InvalidArgument for
    sizes that Triton's kernels do not serve."""
    dtype = pool.dtype if fp8 is None else fp8.dtype
    if pool.device.type != "cuda" or dtype == torch.float32 or pool.shape[5] in FLASHINFER_HEAD_DIMS:
        return None
    check_sizes(dtype, pool.shape[4], head_sizes(pool.shape[5]))
    from tandem.cache.kernels.paged.kernels import TritonKernels  # needs triton

    return TritonKernels(pool, scoring, fp8)


def _flashinfer(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Makes FlashInfer's kernels for 16 bits on a GPU, possibly stored in 8."""
    if pool.device.type != "cuda" or (pool.dtype if fp8 is None else fp8.dtype) == torch.float32:
        return None
    from tandem.cache.kernels.flashinfer.kernels import FlashInferKernels  # needs triton

    return FlashInferKernels(pool, scoring, fp8)


def _native(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Makes native kernels for float32 on a CPU, where they can be built."""
    if pool.device.type != "cpu" or pool.dtype != torch.float32 or not NativeKernels.takes_head_dim(pool.shape[-1]):
        return None
    library = load_library(SOURCE)
    crew = None if library is None else load_crew()
    return None if library is None or crew is None else NativeKernels(pool, scoring, library, crew)


KV_BACKENDS: Mapping[str, Callable[[Tensor, Scoring, Fp8Entries | None], AppendThenAttend | None]] = MappingProxyType(
    {"triton": _triton, "flashinfer": _flashinfer, "native": _native, "torch": TorchKernels}
)
"""Backends for pools of K and V, in the order in which they are asked: None where one does not serve the pool."""


def choose_kernels(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> AppendThenAttend:
    """The first of KV_BACKENDS that serves the pool.

    The first call may compile, which takes a second. InvalidArgument for 16 bits on a GPU in sizes that
    none serves.
    """
    offers = (offer(pool, scoring, fp8) for offer in KV_BACKENDS.values())
    return next(backend for backend in offers if backend is not None)


def choose_row_shift(device: torch.device) -> Callable[[DeviceTables, Tensor, int], None]:
    """Triton's on a GPU, else torch's: see tandem.cache.kernels.torch.row_shift."""
    if device.type == "cuda":
        from tandem.cache.kernels.triton import row_shift

        return row_shift.shift_rows
    return shift_rows
