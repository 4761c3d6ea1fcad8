"""Which layer kernels serve a device."""

import torch

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.native_layer import NativeLayerKernels, load_native_layer
from tandem.workers.kernels.torch_layer import TorchLayerKernels


def choose_layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Triton's for 16 bits on a GPU, native ones for float32 on a CPU where they can be built, else torch's."""
    if device.type == "cuda" and dtype != torch.float32:
        from tandem.workers.kernels.triton_layer import TritonLayerKernels  # triton may be missing elsewhere

        return TritonLayerKernels()
    return native_layer_kernels(device, dtype) or TorchLayerKernels()


def native_layer_kernels(device: torch.device, dtype: torch.dtype) -> NativeLayerKernels | None:
    """None where they do not serve. The first call may compile: a second."""
    return load_native_layer() if device.type == "cpu" and dtype == torch.float32 else None
