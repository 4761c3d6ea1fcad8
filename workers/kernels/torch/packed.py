"""The reference of PackedKernels, which dequantizes some rows at a time: plain torch, on any device."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.packed_linear import ZERO, PackedLinear

BLOCK_NUMBERS = 1 << 20  # dequantized at once
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class TorchPacked:
    """See PackedKernels."""

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        y = x.new_empty(x.shape[0], weights.rows)
        count = max(1, BLOCK_NUMBERS // weights.columns)
        for begin in range(0, weights.rows, count):
            end = min(begin + count, weights.rows)
            bias = None if weights.bias is None else weights.bias[begin:end]
            y[:, begin:end] = F.linear(x, dequantize(weights, begin, end).to(x.dtype), bias)
        return y

    def grouped(
        self, x: Tensor, weights: PackedLinear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int
    ) -> Tensor:
        """Multiplies as the kernels do. It is for tests, because it reads the blocks on the host."""
        y = torch.zeros(blocks.num_pairs, weights.rows, dtype=torch.float32, device=x.device)
        for pairs, expert in zip(blocks.pairs.long(), blocks.experts.tolist(), strict=True):
            rows = pairs[pairs < blocks.num_pairs]
            if expert < weights.numbers.shape[0]:
                matrix = dequantize(one_of(weights, expert), 0, weights.rows).to(x.dtype).float()
                bias = None if weights.bias is None else weights.bias[expert].float()
                y[rows] = F.linear(x[rows // fan_out].float(), matrix, bias)
        return (y if scale is None else y * scale[:, None]).to(x.dtype)


def dequantize(weights: PackedLinear, begin: int, end: int) -> Tensor:
    """float32 [end - begin, columns]: rows of one matrix."""
    table = number_pairs(weights.is_float, weights.numbers.device)
    values = table.index_select(0, weights.numbers[begin:end].flatten().int())
    values = values.view(torch.float32).view(end - begin, weights.columns)
    scales = weights.scales[begin:end]
    if weights.is_float:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    zeros = None if weights.zeros is None else (weights.zeros[begin:end] - ZERO).view(torch.int8)
    if weights.groups is not None:
        values -= 0 if zeros is None else zeros.index_select(1, weights.groups)
        return values.mul_(scales.index_select(1, weights.groups))
    in_groups = values.unflatten(1, (scales.shape[1], -1))
    if zeros is not None:
        in_groups -= zeros[:, :, None]
    return in_groups.mul_(scales[:, :, None]).flatten(1)


def one_of(weights: PackedLinear, index: int) -> PackedLinear:
    """Returns views of one expert's weight."""
    parts = (weights.numbers, weights.scales, weights.zeros, weights.groups, weights.bias)
    return PackedLinear(*(None if one is None else one[index] for one in parts))  # type: ignore[arg-type]


@cache
def number_pairs(is_float: bool, device: torch.device) -> Tensor:
    """float64 [256]: the two float32 numbers of each byte, which are copied at once."""
    numbers = E2M1 if is_float else [number - ZERO for number in range(16)]
    pairs = [(numbers[byte & 15], numbers[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.float64).flatten()
