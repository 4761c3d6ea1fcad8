"""Weights of 4 bits in groups of columns, which memory holds packed."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.kernels.choice import choose_packed_kernels
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.packed_linear import PackedLinear
from tandem.workers.kernels.torch.packed import BLOCK_NUMBERS, dequantize
from tandem.workers.weights.allocator import Allocator, Form
from tandem.workers.weights.weight import Projection, Weight, WeightStack

ROWS = 1024  # that are put into order at once


@dataclass(frozen=True, eq=False)
class PackedForm(Form):
    """The form in which memory holds packed weights."""

    group: int | None  # columns that share a scale; None: all of a row
    zeros: bool = False
    exponents: bool = False  # scales are exponents
    groups: Tensor | None = None  # see PackedLinear, on a CPU

    def weight(self, new: Allocator, rows: int, columns: int, bias: Tensor | None) -> "Packed":
        return Packed(*self._tensors(new, (rows,), columns), bias, new.dtype)

    def stack(
        self, new: Allocator, count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> "PackedStack":
        """Makes a stack. Packed numbers are never transposed."""
        return PackedStack(*self._tensors(new, (count, rows), columns), bias, new.dtype)

    def _tensors(
        self, new: Allocator, lines: tuple[int, ...], columns: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        choose_packed_kernels(new.device, new.dtype)  # compiled before a graph is captured
        grid = (*lines, 1 if self.group is None else columns // self.group)
        numbers = new(*lines, columns // 2, dtype=torch.uint8)
        scales = new(*grid, dtype=torch.uint8 if self.exponents else None)
        zeros = new(*grid, dtype=torch.uint8) if self.zeros else None
        return numbers, scales, zeros, None if self.groups is None else self.groups.to(new.device)


@dataclass(frozen=True, eq=False)
class _Packed(PackedLinear):
    """The common part of a weight and a stack of weights."""

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
        return choose_packed_kernels(self.device, self.computed).linear(x, self)

    def prepare(self, *, shared: bool = False) -> Projection:
        """Puts columns into the order of their groups on a GPU, whose fast kernels take neighbours as groups."""
        return self if self.groups is None or self.device.type == "cpu" else InGroups(self)


class InGroups(Projection):
    """A weight whose columns, and so x's columns, are in the order of their groups. It takes a copy."""

    def __init__(self, weight: Packed) -> None:
        """weight: with groups of one size, as checkpoints have them; others are multiplied as they are."""
        assert weight.groups is not None  # else there is nothing to put into order
        self._order = weight.groups.argsort(stable=True)
        neighbours = torch.arange(weight.columns, device=weight.device) // weight.group_size
        self._weight, self._moves = weight, torch.equal(weight.groups[self._order], neighbours.int())
        if self._moves:
            numbers = torch.empty_like(weight.numbers)
            for some, moved in zip(weight.numbers.split(ROWS), numbers.split(ROWS), strict=True):
                halves = torch.stack((some & 15, some >> 4), -1).flatten(1).index_select(1, self._order)
                torch.bitwise_or(halves[:, 0::2], halves[:, 1::2] << 4, out=moved)
            self._weight = dataclasses.replace(weight, numbers=numbers, groups=None)

    def linear(self, x: Tensor) -> Tensor:
        return self._weight.linear(x.index_select(1, self._order) if self._moves else x)


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
        return choose_packed_kernels(self.device, self.computed).grouped(x, self, blocks, scale, fan_out)
