"""Which layer kernels serve a device."""

import torch

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.torch_layer import TorchLayerKernels


def choose_layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Triton's for 16 bits on a GPU, torch's elsewhere."""
    if device.type == "cuda" and dtype != torch.float32:
        from tandem.workers.kernels.triton_layer import TritonLayerKernels  # triton may be missing elsewhere

        return TritonLayerKernels()
    return TorchLayerKernels()
