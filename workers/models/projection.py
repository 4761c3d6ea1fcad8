"""Linear layers in the form that the processor multiplies fastest."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.choice import choose_fused_gemms, choose_streamed_gemm, native_layer_kernels
from tandem.workers.kernels.native.layer import pack

PARTS = 2
PARTED_ROWS, LEAST_TO_PART = range(129, 257), 8192  # columns; by measurement, see decision 0038


class Projection:
    """x [T, in] → x · weightᵀ + bias [T, out].

    A float32 weight on a CPU is kept in the panels of native_layer.c where that can be built, and nowhere else. On a
    GPU in 16 bits, FusedGemms multiply one row, and streamed_gemm the few rows of a decode step, if it is faster.
    """

    def __init__(self, weights: Linear) -> None:
        weight = weights.weight
        self._outputs = weight.shape[0]
        self._native = native_layer_kernels(weight.device, weight.dtype)
        self._weights = weights if self._native is None else Linear(pack(weight), weights.bias)
        self._fused_gemms = choose_fused_gemms(weight.device, weight.dtype)
        self.streamed_gemm = choose_streamed_gemm(weights)

    def __call__(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.linear(x, self._weights, self._outputs)
        if self._fused_gemms is not None and x.shape[0] == 1:
            return self._fused_gemms.linear(x, self._weights)
        if self.streamed_gemm is not None and self.streamed_gemm.takes(x):
            return self.streamed_gemm(x)
        return F.linear(x, self._weights.weight, self._weights.bias)

    def in_parts(self, x: Tensor) -> Tensor:
        """The same, for LayerKernels.add_rms_norm: on a GPU, where that is faster, float32 [PARTS, T, out], to be added
        up. Else torch would split such sums too, and add them up in a kernel of its own."""
        weight, bias = self._weights.weight, self._weights.bias
        columns, halves = weight.shape[-1], x.dtype in (torch.bfloat16, torch.float16)
        long = columns >= LEAST_TO_PART and columns % PARTS == 0
        if not (x.is_cuda and halves and long and x.shape[0] in PARTED_ROWS and bias is None):
            return self(x)
        rows = x.unflatten(1, (PARTS, columns // PARTS)).transpose(0, 1)
        parts = weight.unflatten(1, (PARTS, columns // PARTS)).permute(1, 2, 0)
        return torch.bmm(rows, parts, out_dtype=torch.float32)
