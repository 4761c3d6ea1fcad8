"""Which kernels serve a pool."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import FLASHINFER_HEAD_DIMS, DeviceTables, IndexBackend, LatentBackend
from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.gpu_limits import check_sizes, head_sizes, index_sizes
from tandem.cache.kernels.native.crew import load_crew
from tandem.cache.kernels.native.kernels import SOURCE, NativeKernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.index import TorchIndexKernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kernels.torch.latent import TorchLatentKernels
from tandem.cache.kernels.torch.row_shift import shift_rows
from tandem.cache.plan.latent import LatentHeads


def _triton(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Of 16 bits on a GPU, for heads that FlashInfer has none for. InvalidArgument for sizes that it does not serve."""
    dtype = pool.dtype if fp8 is None else fp8.dtype
    if pool.device.type != "cuda" or dtype == torch.float32 or pool.shape[5] in FLASHINFER_HEAD_DIMS:
        return None
    check_sizes(dtype, pool.shape[4], head_sizes(pool.shape[5]))
    from tandem.cache.kernels.paged.kernels import TritonKernels  # needs triton

    return TritonKernels(pool, scoring, fp8)


def _flashinfer(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Of 16 bits on a GPU, also stored in 8."""
    if pool.device.type != "cuda" or (pool.dtype if fp8 is None else fp8.dtype) == torch.float32:
        return None
    from tandem.cache.kernels.flashinfer.kernels import FlashInferKernels  # needs triton

    return FlashInferKernels(pool, scoring, fp8)


def _native(pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None) -> AppendThenAttend | None:
    """Of float32 on a CPU where they can be built."""
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


def choose_latent_kernels(
    pool: Tensor, scale: float, rank: int, heads: LatentHeads, top_k: int | None = None
) -> LatentBackend:
    """FlashInfer's for 16 bits on a GPU, else torch's; InvalidArgument for what FlashInfer cannot serve. top_k: of the
    layers' index keys."""
    if pool.device.type == "cuda" and pool.dtype != torch.float32:
        from tandem.cache.kernels.flashinfer.latent import FlashInferLatentKernels  # needs triton

        return FlashInferLatentKernels(pool, scale, rank, heads, top_k)
    return TorchLatentKernels(pool, scale, rank, heads, top_k)


def choose_index_kernels(pool: Tensor, rank: int, top_k: int) -> IndexBackend:
    """Triton's for 16 bits on a GPU, else torch's; InvalidArgument for sizes that were not tried there."""
    if pool.device.type == "cuda" and pool.dtype != torch.float32:
        from tandem.cache.kernels.triton.index import TritonIndexKernels

        check_sizes(pool.dtype, pool.shape[4], index_sizes(pool.shape[5], rank))
        return TritonIndexKernels(pool, rank, top_k)
    return TorchIndexKernels(pool, rank, top_k)


def choose_row_shift(device: torch.device) -> Callable[[DeviceTables, Tensor, int], None]:
    """Triton's on a GPU, else torch's: see tandem.cache.kernels.torch.row_shift."""
    if device.type == "cuda":
        from tandem.cache.kernels.triton import row_shift

        return row_shift.shift_rows
    return shift_rows
