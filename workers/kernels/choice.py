"""The choice of the kernels that serve a device."""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from tandem.workers.kernels.adapter_linear import AdapterKernels
from tandem.workers.kernels.base import (
    DeltaKernels,
    DraftKernels,
    FusedGemms,
    HyperKernels,
    LayerKernels,
    Linear,
    LogitsKernels,
    Sampler,
    ScaledLinear,
)
from tandem.workers.kernels.decode_megakernel.megakernel import Launch, MegakernelShape, load_megakernels
from tandem.workers.kernels.expert_blocks import ExpertBlocks, GroupedLinear, expert_blocks
from tandem.workers.kernels.native.layer import NativeLayerKernels, load_native_layer
from tandem.workers.kernels.packed_linear import PackedKernels
from tandem.workers.kernels.skinny_gemm.packed import load_packed_gemms
from tandem.workers.kernels.skinny_gemm.resident import ResidentGemms, ResidentShape, load_resident_gemms
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm, load_streamed_gemms
from tandem.workers.kernels.torch.adapters import TorchAdapters
from tandem.workers.kernels.torch.delta import TorchDelta
from tandem.workers.kernels.torch.drafts import TorchDraftKernels
from tandem.workers.kernels.torch.hyper import TorchHyperKernels
from tandem.workers.kernels.torch.layer import TorchLayerKernels, grouped_linear
from tandem.workers.kernels.torch.logits import TorchLogits
from tandem.workers.kernels.torch.packed import TorchPacked
from tandem.workers.kernels.torch.sampler import TorchSampler

MAX_FUSED_STREAMS = 8  # a program of Triton's kernels holds all weights of a token


def choose_layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Triton's for 16 bits on a GPU, native ones for float32 on a CPU where they can be built, else torch's."""
    if device.type == "cuda" and dtype != torch.float32:
        from tandem.workers.kernels.triton.layer import TritonLayerKernels  # triton may be missing elsewhere

        return TritonLayerKernels()
    return native_layer_kernels(device, dtype) or TorchLayerKernels()


def choose_delta_kernels(device: torch.device, dtype: torch.dtype) -> DeltaKernels:
    """Chooses Triton's kernels for 16 bits on a GPU, else torch's."""
    if device.type != "cuda" or dtype == torch.float32:
        return TorchDelta()
    from tandem.workers.kernels.triton.delta import TritonDelta  # triton may be missing elsewhere

    return TritonDelta()


def choose_adapter_kernels(device: torch.device) -> AdapterKernels:
    """Chooses Triton's kernels on a GPU, else torch's."""
    if device.type != "cuda":
        return TorchAdapters()
    from tandem.workers.kernels.triton.adapters import TritonAdapters  # triton may be missing elsewhere

    return TritonAdapters()


def native_layer_kernels(device: torch.device, dtype: torch.dtype) -> NativeLayerKernels | None:
    """None where they do not serve. The first call may compile: a second."""
    return load_native_layer() if device.type == "cpu" and dtype == torch.float32 else None


def choose_fused_gemms(device: torch.device, dtype: torch.dtype) -> FusedGemms | None:
    """Returns the kernels for 16 bits on a GPU; None elsewhere."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    from tandem.workers.kernels.triton.gemv import TritonGemv  # triton may be missing elsewhere

    return TritonGemv()


def choose_streamed_gemm(weights: Linear | None, *, gated: bool = False) -> StreamedGemm | None:
    """A GEMM of the weights and the rows of a decode step that is faster than torch's; None: there is none."""
    if weights is None or weights.bias is not None:
        return None
    gemms = load_streamed_gemms(weights.weight.device, weights.weight.dtype)
    return None if gemms is None else gemms.prepare(weights.weight, gated=gated)


def choose_scaled_linear(weights: ScaledLinear) -> Callable[[Tensor], Tensor]:
    """x [T, in] in 16 bits → x · weightᵀ + bias, where multiplies_fp8()."""
    from tandem.workers.kernels.triton.fp8 import Fp8Gemms  # triton may be missing elsewhere

    return Fp8Gemms(weights)


@cache
def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of the device multiply x of dtype by a ScaledLinear: 16 bits on a GPU that has such numbers."""
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def choose_grouped_linear(device: torch.device) -> GroupedLinear:
    """Chooses Triton's kernel on a GPU, else torch's."""
    if device.type != "cuda":
        return grouped_linear
    from tandem.workers.kernels.triton import grouped  # triton may be missing elsewhere

    return grouped.grouped_linear


def sort_by_expert(experts: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    """See expert_blocks(): by Triton for few pairs on a GPU, else by torch."""
    if experts.device.type != "cuda":
        return expert_blocks(experts, num_experts, rows)
    from tandem.workers.kernels.triton import routing  # triton may be missing elsewhere

    sort = routing.sort_pairs if experts.numel() <= routing.MAX_PAIRS else expert_blocks
    return sort(experts, num_experts, rows)


def choose_best_experts(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Chooses Triton's choose_experts() on a GPU; None: torch must do."""
    if device.type != "cuda":
        return None
    from tandem.workers.kernels.triton.routing import choose_experts  # triton may be missing elsewhere

    return choose_experts


@cache
def choose_packed_kernels(device: torch.device, dtype: torch.dtype) -> PackedKernels:
    """Returns Triton's kernels on a GPU, and CUDA's for few rows where those can be built; else torch's. The first call
    may compile."""
    if device.type != "cuda":
        return TorchPacked()
    from tandem.workers.kernels.triton.packed import TritonPacked  # triton may be missing elsewhere

    return load_packed_gemms(device, dtype, TritonPacked())


def choose_megakernels(shape: MegakernelShape, device: torch.device) -> Mapping[int, Launch]:
    """Kernels of whole steps of such a model, by number of rows; kernels of each layer compute other steps."""
    return load_megakernels(shape, device) if device.type == "cuda" else {}


def choose_resident_gemms(shape: ResidentShape, device: torch.device) -> ResidentGemms | None:
    """Returns GEMMs of few rows of such a model that are faster than GEMMs of any number of rows; None where there
    are none."""
    if device.type != "cuda":
        return None
    return load_resident_gemms(shape, device, choose_layer_kernels(device, shape.dtype))


def choose_sampler(num_rows: int, device: torch.device) -> Sampler:
    """Returns a sampler for steps of up to num_rows rows: Triton's on a GPU, else torch's."""
    if device.type != "cuda":
        return TorchSampler()
    from tandem.workers.kernels.triton.sampler import TritonSampler  # triton may be missing elsewhere

    return TritonSampler(num_rows, device)


def choose_draft_kernels(device: torch.device) -> DraftKernels:
    """Chooses Triton's kernels on a GPU, else torch's."""
    if device.type != "cuda":
        return TorchDraftKernels()
    from tandem.workers.kernels.triton.drafts import TritonDraftKernels  # triton may be missing elsewhere

    return TritonDraftKernels()


def choose_hyper_kernels(device: torch.device, num_streams: int) -> HyperKernels:
    """Chooses Triton's kernels for few streams on a GPU, else torch's."""
    if device.type == "cuda" and num_streams <= MAX_FUSED_STREAMS:
        from tandem.workers.kernels.triton.hyper import TritonHyperKernels  # triton may be missing elsewhere

        return TritonHyperKernels()
    return TorchHyperKernels()


def choose_logits_kernels(device: torch.device) -> LogitsKernels:
    """Chooses Triton's kernels on a GPU, else torch's."""
    if device.type != "cuda":
        return TorchLogits()
    from tandem.workers.kernels.triton.logits import TritonLogits  # triton may be missing elsewhere

    return TritonLogits()
