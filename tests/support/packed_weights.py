"""Random packed weights, and what their numbers mean bit by bit."""

import torch
from torch import Tensor

from tandem.workers.kernels.packed_linear import PackedLinear


def random_packed(
    *shape: int,
    group: int,
    is_float: bool = False,
    zeros: bool = False,
    act_order: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PackedLinear:
    """shape: [rows, columns] or [E, rows, columns]."""
    generator = torch.Generator().manual_seed(sum(shape) + group)
    *experts, rows, columns = shape
    grid = (*experts, rows, columns // group)

    def integers(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator, dtype=torch.uint8)

    scales = torch.rand(grid, generator=generator) * 0.02 + 0.001
    groups = None
    if act_order:
        owners = torch.arange(columns) // group
        lines = [owners[torch.randperm(columns, generator=generator)] for _ in range(experts[0] if experts else 1)]
        groups = (torch.stack(lines) if experts else lines[0]).int().to(device)
    return PackedLinear(
        integers(0, 256, *experts, rows, columns // 2).to(device),
        integers(118, 125, *grid).to(device) if is_float else scales.to(device, dtype),
        integers(0, 16, *grid).to(device) if zeros else None,
        groups,
        torch.randn(*experts, rows, generator=generator).to(device, dtype) if bias else None,
    )


def naive_matrix(weights: PackedLinear) -> Tensor:
    """float64 [rows, columns] of one matrix: each number by itself."""
    numbers, scales = weights.numbers.cpu().tolist(), weights.scales.cpu().double().tolist()
    zeros = None if weights.zeros is None else weights.zeros.cpu().tolist()
    size = weights.columns // len(scales[0])
    owners = [column // size for column in range(weights.columns)]
    owners = owners if weights.groups is None else weights.groups.cpu().tolist()
    matrix = torch.empty(weights.rows, weights.columns, dtype=torch.float64)
    for row, line in enumerate(numbers):
        for column, group in enumerate(owners):
            number = line[column // 2] >> 4 if column % 2 else line[column // 2] & 15
            if weights.is_float:
                sign, exponent, mantissa = number >> 3, (number >> 1) & 3, number & 1
                size_of = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                matrix[row, column] = (-1) ** sign * size_of * 2.0 ** (scales[row][group] - 127)
            else:
                matrix[row, column] = (number - (8 if zeros is None else zeros[row][group])) * scales[row][group]
    return matrix
