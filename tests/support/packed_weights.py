"""Random packed weights, and their numbers decoded bit by bit."""

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
    """Makes random weights. shape: [rows, columns] or [E, rows, columns]."""
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
    """Returns one matrix by the definition of its numbers, float64 [rows, columns]."""
    packed, scales = weights.numbers.cpu(), weights.scales.cpu().double()
    numbers = torch.stack((packed & 15, packed >> 4), -1).flatten(1).double()
    neighbours = torch.arange(weights.columns) // (weights.columns // scales.shape[1])
    owners = neighbours if weights.groups is None else weights.groups.cpu().long()
    if not weights.is_float:
        zeros = 8 if weights.zeros is None else weights.zeros.cpu().double()[:, owners]
        return (numbers - zeros) * scales[:, owners]
    sign, exponent, mantissa = numbers // 8, numbers // 2 % 4, numbers % 2
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2 ** (exponent - 1))
    return (-1) ** sign * size * 2 ** (scales[:, owners] - 127)
