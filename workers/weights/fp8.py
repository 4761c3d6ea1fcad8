"""Weights in 8 bits: numbers E4M3, and a float32 scale for each row, or for each group of a row's columns.

Whatever shares a scale in a checkpoint, here each row has its own. So fused weights may have unlike parts, rows may be
put into another order, and ranks divide rows anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear, ScaledLinear
from tandem.workers.kernels.choice import (
    choose_grouped_linear,
    choose_scaled_linear,
    multiplies_fp8,
    native_layer_kernels,
)
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.native.layer import pack
from tandem.workers.weights.allocator import Allocator, Form
from tandem.workers.weights.weight import Projection, Weight, WeightStack

NUMBERS = torch.float8_e4m3fn
AT_ONCE = 1 << 19  # numbers that a CPU dequantizes for a product
ROW_BLOCK = 128  # rows that share scales in nearly all checkpoints that have blocks
LEAST_GROUP, MOST_GROUP = 16, 128


@dataclass(frozen=True)
class Fp8Form(Form):
    """group: columns that share a scale of a row; None: all."""

    group: int | None

    def weight(self, new: Allocator, rows: int, columns: int, bias: Tensor | None) -> "Fp8":
        group, groups = self._groups(columns)
        scales = new(rows, groups, dtype=torch.float32)
        return Fp8(new(rows, columns, dtype=NUMBERS), scales, bias, group, new.dtype)

    def stack(
        self, new: Allocator, count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> "Fp8Stack":
        """Makes a stack that is not transposed: no checkpoint has the experts of a layer in one tensor of FP8."""
        group, groups = self._groups(columns)
        scales = new(count, rows, groups, dtype=torch.float32)
        return Fp8Stack(new(count, rows, columns, dtype=NUMBERS), scales, bias, group, new.dtype)

    def _groups(self, columns: int) -> tuple[int, int]:
        """Returns the columns of a group, and the groups of a row."""
        group = columns if self.group is None else self.group
        return group, -(-columns // max(1, group))


@dataclass(frozen=True, eq=False)
class Fp8(Weight):
    """See Weight. weight[r, c] = numbers[r, c] · scales[r, c // group]."""

    numbers: Tensor  # float8_e4m3fn [rows, columns]
    scales: Tensor  # float32 [rows, groups]
    bias: Tensor | None  # [rows], of dtype
    group: int  # columns; the last group of a row may have fewer
    computed_in: torch.dtype  # of x and of the product

    @property
    def dtype(self) -> torch.dtype:
        return self.computed_in

    @property
    def rows(self) -> int:
        return self.numbers.shape[0]

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"weight": self.numbers, "weight_scale": self.scales}
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    def slice(self, begin: int, end: int) -> "Fp8":
        bias = None if self.bias is None else self.bias[begin:end]
        return Fp8(self.numbers[begin:end], self.scales[begin:end], bias, self.group, self.computed_in)

    def tensor(self) -> Tensor:
        whole = torch.empty(self.rows, self.columns, dtype=self.dtype, device=self.device)
        for begin, end in self._row_blocks():
            whole[begin:end] = self._dequantized(begin, end)
        return whole

    def look_up(self, rows: Tensor) -> Tensor:
        return Fp8(self.numbers[rows], self.scales[rows], None, self.group, self.computed_in).tensor()

    def plain(self) -> ScaledLinear | None:
        if not multiplies_fp8(self.device, self.dtype) or not _suits(self.scales, self.group):
            return None
        scales, row_block = _compact(self.scales)
        return ScaledLinear(self.numbers, self.bias, scales=scales, row_block=row_block, group=self.group)

    def prepare(self, *, shared: bool = False) -> Projection:
        scaled, native = self.plain(), native_layer_kernels(self.device, self.dtype)
        if scaled is not None:
            return Fp8Projection(choose_scaled_linear(scaled))
        if native is None:
            return self
        numbers, scales = pack(self.numbers.view(torch.uint8)), pack(self.scales)
        packed = ScaledLinear(numbers, self.bias, scales=scales, row_block=1, group=self.group)
        return Fp8Projection(partial(native.scaled_linear, packed=packed, outputs=self.rows))

    def linear(self, x: Tensor) -> Tensor:
        """Multiplies by blocks of rows, each dequantized. It takes AT_ONCE numbers in addition to the product."""
        y = x.new_empty(x.shape[0], self.rows)
        for begin, end in self._row_blocks():
            bias = None if self.bias is None else self.bias[begin:end]
            y[:, begin:end] = F.linear(x, self._dequantized(begin, end), bias)
        return y

    def _row_blocks(self) -> list[tuple[int, int]]:
        count = max(1, AT_ONCE // max(1, self.columns))
        return [(begin, min(begin + count, self.rows)) for begin in range(0, self.rows, count)]

    def _dequantized(self, begin: int, end: int) -> Tensor:
        values, scales = self.numbers[begin:end].float(), self.scales[begin:end]
        whole = self.columns // self.group if self.columns else 0  # groups that are not cut off
        values[:, : whole * self.group].unflatten(1, (whole, self.group)).mul_(scales[:, :whole, None])
        values[:, whole * self.group :].mul_(scales[:, whole:])
        return values.to(self.dtype)


class Fp8Projection(Projection):
    """The projection of a weight that kernels multiply by in 8 bits."""

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self._multiply = multiply

    def linear(self, x: Tensor) -> Tensor:
        return self._multiply(x)


def _suits(scales: Tensor, group: int) -> bool:
    """Whether kernels multiply groups of so many columns."""
    return scales.shape[-1] == 1 or (LEAST_GROUP <= group <= MOST_GROUP and group & (group - 1) == 0)


def _compact(scales: Tensor) -> tuple[Tensor, int]:
    """The scales [..., rows, groups] of each ROW_BLOCK rows and ROW_BLOCK, where these share them; else all, and 1."""
    rows, groups = scales.shape[-2:]
    first = scales[..., ::ROW_BLOCK, :]
    if groups > 1 and torch.equal(first.repeat_interleave(ROW_BLOCK, -2)[..., :rows, :], scales):
        return first.contiguous(), ROW_BLOCK
    return scales, 1


@dataclass(frozen=True, eq=False)
class Fp8Stack(WeightStack):
    """See WeightStack and Fp8; each tensor has another dimension before."""

    numbers: Tensor
    scales: Tensor
    bias: Tensor | None
    group: int
    computed_in: torch.dtype

    @property
    def count(self) -> int:
        return self.numbers.shape[0]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"weight": self.numbers, "weight_scale": self.scales}
        return tensors if self.bias is None else tensors | {"bias": self.bias}

    def one(self, index: int) -> Fp8:
        bias = None if self.bias is None else self.bias[index]
        return Fp8(self.numbers[index], self.scales[index], bias, self.group, self.computed_in)

    def prepare(self) -> Callable[[Tensor], Tensor]:
        ones = [replace(self.one(index), bias=None).prepare() for index in range(self.count)]
        return lambda x: torch.stack([one.linear(rows) for one, rows in zip(ones, x, strict=True)])

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        return self.prepare_grouped()(x, blocks, scale, fan_out)

    def prepare_grouped(self) -> Callable[[Tensor, ExpertBlocks, Tensor | None, int], Tensor]:
        """Multiplies dequantized weights where no kernel takes such groups."""
        multiply, linear = choose_grouped_linear(self.device), self._linear()
        return lambda x, blocks, scale, fan_out: multiply(x, linear, blocks, scale, fan_out)

    def _linear(self) -> Linear:
        if not multiplies_fp8(self.device, self.computed_in) or not _suits(self.scales, self.group):
            return Linear(torch.stack([self.one(index).tensor() for index in range(self.count)]), self.bias)
        scales, row_block = _compact(self.scales)
        return ScaledLinear(self.numbers, self.bias, scales=scales, row_block=row_block, group=self.group)
