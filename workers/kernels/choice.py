"""Which layer kernels serve a device."""

import torch

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.torch_layer import TorchLayerKernels


def choose_layer_kernels(device: torch.device, dtype: torch.dtype) -> LayerKernels:
    """Torch's everywhere, as yet."""
    return TorchLayerKernels()
