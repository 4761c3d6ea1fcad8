"""Weights of 4 bits in groups of columns, which memory holds packed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.kernels.choice import choose_packed_kernels
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.packed_linear import PackedLinear
from tandem.workers.kernels.torch.packed import BLOCK_NUMBERS, dequantize
from tandem.workers.weights.weight import Weight, WeightStack


@dataclass(frozen=True, eq=False)
class _Packed(PackedLinear):
    """What a weight and a stack of them have in common."""

    computed: torch.dtype  # of x and of products

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def tensors(self) -> dict[str, Tensor]:
        held = {"numbers": self.numbers, "scales": self.scales, "zeros": self.zeros, "bias": self.bias}
        return {kind: tensor for kind, tensor in held.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class Packed(_Packed, Weight):
    """See Weight."""

    @property
    def dtype(self) -> torch.dtype:
        return self.computed

    def slice(self, begin: int, end: int) -> "Packed":
        zeros, bias = (None if one is None else one[begin:end] for one in (self.zeros, self.bias))
        return Packed(self.numbers[begin:end], self.scales[begin:end], zeros, self.groups, bias, self.computed)

    def tensor(self) -> Tensor:
        matrix = torch.empty(self.rows, self.columns, dtype=self.computed, device=self.device)
        count = max(1, BLOCK_NUMBERS // self.columns)
        for begin in range(0, self.rows, count):
            end = min(begin + count, self.rows)
            matrix[begin:end] = dequantize(self, begin, end)
        return matrix

    def linear(self, x: Tensor) -> Tensor:
        return choose_packed_kernels(self.device).linear(x, self)


@dataclass(frozen=True, eq=False)
class PackedStack(_Packed, WeightStack):
    """See WeightStack."""

    @property
    def count(self) -> int:
        return self.numbers.shape[0]

    def one(self, index: int) -> Packed:
        zeros, groups, bias = (None if one is None else one[index] for one in (self.zeros, self.groups, self.bias))
        return Packed(self.numbers[index], self.scales[index], zeros, groups, bias, self.computed)

    def prepare(self) -> Callable[[Tensor], Tensor]:
        matrices = torch.stack([self.one(index).tensor() for index in range(self.count)])
        return lambda x: torch.bmm(x, matrices.transpose(1, 2))

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        return choose_packed_kernels(self.device).grouped(x, self, blocks, scale, fan_out)
