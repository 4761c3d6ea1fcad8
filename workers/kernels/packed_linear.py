"""Matrices whose numbers have 4 bits, as kernels take them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.kernels.expert_blocks import ExpertBlocks

ZERO = 8  # the number that stands for 0 where no zeros are kept


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear layer x → x · weightᵀ + bias, or one for each of E experts: every tensor then is [E, …].

    A byte has two columns of a row, the first in its low bits. Columns of a group share a scale. An integer's weight is
    (number - zero) · scale. Where scales are exponents, a number is E2M1's, and its weight is number · 2^(scale - 127).
    """

    numbers: Tensor  # uint8 [rows, columns / 2]
    scales: Tensor  # [rows, groups], floats; or uint8: exponents
    zeros: Tensor | None  # uint8 [rows, groups]; None: ZERO
    groups: Tensor | None  # int32 [columns], the group of each; None: groups are neighbours of one size
    bias: Tensor | None  # [rows]

    @property
    def rows(self) -> int:
        return self.numbers.shape[-2]

    @property
    def columns(self) -> int:
        return 2 * self.numbers.shape[-1]

    @property
    def group_size(self) -> int:
        return self.columns // self.scales.shape[-1]

    @property
    def is_float(self) -> bool:
        """Whether numbers are E2M1's."""
        return self.scales.dtype == torch.uint8


class PackedKernels(Protocol):
    """Products with packed weights, whose numbers are rounded to the dtype of x and summed in float32."""

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        """Multiplies x [T, columns] to [T, rows]."""
        ...

    def grouped(
        self, x: Tensor, weights: PackedLinear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int
    ) -> Tensor:
        """See GroupedLinear."""
        ...
