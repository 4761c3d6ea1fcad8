"""Which layer kernels serve a device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels, RowKernels, StepTokens
from tandem.workers.kernels.decode_megakernel.row_step import Launch, RowStepShape, load_launches
from tandem.workers.kernels.native.layer import NativeLayerKernels, load_native_layer
from tandem.workers.kernels.skinny_gemm.narrow_product import NarrowKernels, NarrowShape, load_narrow_kernels
from tandem.workers.kernels.skinny_gemm.step_product import StepProduct, load_step_products
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.kernels.torch.step_tokens import TorchStepTokens


def choose_layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Triton's for 16 bits on a GPU, native ones for float32 on a CPU where they can be built, else torch's."""
    if device.type == "cuda" and dtype != torch.float32:
        from tandem.workers.kernels.triton.layer import TritonLayerKernels  # triton may be missing elsewhere

        return TritonLayerKernels()
    return native_layer_kernels(device, dtype) or TorchLayerKernels()


def native_layer_kernels(device: torch.device, dtype: torch.dtype) -> NativeLayerKernels | None:
    """None where they do not serve. The first call may compile: a second."""
    return load_native_layer() if device.type == "cpu" and dtype == torch.float32 else None


def choose_row_kernels(device: torch.device, dtype: torch.dtype) -> RowKernels | None:
    """For 16 bits on a GPU; None elsewhere."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    from tandem.workers.kernels.triton.gemv import TritonRowKernels  # triton may be missing elsewhere

    return TritonRowKernels()


def choose_step_product(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> StepProduct | None:
    """What multiplies a weight [out, in] with the rows of a decode step faster than torch does; None: nothing."""
    products = None if bias is not None else load_step_products(weight.device, weight.dtype)
    return None if products is None else products.prepare(weight, gated=gated)


def choose_row_launches(shape: RowStepShape, device: torch.device) -> Mapping[int, Launch]:
    """What computes whole steps of such a model, by their number of rows; for others kernels of each layer do."""
    return load_launches(shape, device) if device.type == "cuda" else {}


def choose_narrow_kernels(shape: NarrowShape, device: torch.device) -> NarrowKernels | None:
    """What multiplies few rows of such a model faster than any rows' kernels do; None: nothing."""
    if device.type != "cuda":
        return None
    return load_narrow_kernels(shape, device, choose_layer_kernels(device, shape.dtype))


def choose_step_tokens(num_rows: int, device: torch.device) -> StepTokens:
    """For steps of up to num_rows rows: Triton's on a GPU, else torch's."""
    if device.type != "cuda":
        return TorchStepTokens()
    from tandem.workers.kernels.triton.step_tokens import TritonStepTokens  # triton may be missing elsewhere

    return TritonStepTokens(num_rows, device)
