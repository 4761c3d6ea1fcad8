"""Weights in the dtype that their model computes in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.choice import (
    choose_fused_gemms,
    choose_grouped_linear,
    choose_streamed_gemm,
    native_layer_kernels,
)
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.native.layer import pack
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.weights.weight import Projection, Weight, WeightStack

PARTS = 2
PARTED_ROWS, LEAST_TO_PART = range(129, 257), 8192  # columns; by measurement, see decision 0038


@dataclass(frozen=True, eq=False)
class _Plain(Linear):
    """The common part of a weight and a stack of weights."""

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}


@dataclass(frozen=True, eq=False)
class Dense(_Plain, Weight):
    """See Weight. By itself it multiplies as torch does."""

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def slice(self, begin: int, end: int) -> "Dense":
        return Dense(self.weight[begin:end], None if self.bias is None else self.bias[begin:end])

    def tensor(self) -> Tensor:
        return self.weight

    def look_up(self, rows: Tensor) -> Tensor:
        return self.weight[rows]  # on a GPU index_select takes five times as long for 16 rows

    def plain(self) -> Linear:
        return self

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def prepare(self, *, shared: bool = False) -> Projection:
        packs = native_layer_kernels(self.device, self.dtype) is not None
        return self if shared and packs else DenseProjection(self)


class DenseProjection(Projection):
    """A dense weight in the form that the processor multiplies fastest.

    A float32 weight on a CPU is kept in the panels of native_layer.c where that can be built, and nowhere else. On a
    GPU in 16 bits, FusedGemms multiply one row, and streamed_gemm the few rows of a decode step, if it is faster.
    """

    def __init__(self, weights: Linear) -> None:
        weight = weights.weight
        self._outputs = weight.shape[0]
        self._native = native_layer_kernels(weight.device, weight.dtype)
        self._weights = weights if self._native is None else Linear(pack(weight), weights.bias)
        self._fused_gemms = choose_fused_gemms(weight.device, weight.dtype)
        self._streamed_gemm = choose_streamed_gemm(weights)

    @property
    def streamed_gemm(self) -> StreamedGemm | None:
        return self._streamed_gemm

    def linear(self, x: Tensor) -> Tensor:
        if self._native is not None:
            return self._native.linear(x, self._weights, self._outputs)
        if self._fused_gemms is not None and x.shape[0] == 1:
            return self._fused_gemms.linear(x, self._weights)
        if self._streamed_gemm is not None and self._streamed_gemm.takes(x):
            return self._streamed_gemm(x)
        return F.linear(x, self._weights.weight, self._weights.bias)

    def in_parts(self, x: Tensor) -> Tensor:
        """See Projection. A GPU has PARTS parts where that is faster. Else torch would also split the sum, and add
        it up in a kernel of its own."""
        weight, bias = self._weights.weight, self._weights.bias
        columns, halves = weight.shape[-1], x.dtype in (torch.bfloat16, torch.float16)
        long = columns >= LEAST_TO_PART and columns % PARTS == 0
        if not (x.is_cuda and halves and long and x.shape[0] in PARTED_ROWS and bias is None):
            return self.linear(x)
        rows = x.unflatten(1, (PARTS, columns // PARTS)).transpose(0, 1)
        parts = weight.unflatten(1, (PARTS, columns // PARTS)).permute(1, 2, 0)
        return torch.bmm(rows, parts, out_dtype=torch.float32)


@dataclass(frozen=True, eq=False)
class DenseStack(_Plain, WeightStack):
    """See WeightStack."""

    @property
    def count(self) -> int:
        return self.weight.shape[0]

    def one(self, index: int) -> Dense:
        return Dense(self.weight[index], None if self.bias is None else self.bias[index])

    def prepare(self) -> Callable[[Tensor], Tensor]:
        return partial(torch.bmm, mat2=self.weight.transpose(1, 2))

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        return choose_grouped_linear(self.device)(x, self, blocks, scale, fan_out)
