"""The causal convolution before a recurrent state, with torch operations on any device.

`step_conv` takes one token of each of several sequences, `chunk_conv` all new tokens of one sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def step_conv(x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SiLU of the convolution of the next token of each of B sequences, [B, C], and their tails after it.

    x: [B, C]. tails: [B, taps - 1, C], the inputs of the tokens before, 0 where there are none. weight: [C, taps].
    bias: [C].
    """
    inputs = torch.cat((tails, x.unsqueeze(1)), 1)
    output = torch.einsum("btc,ct->bc", inputs, weight)
    return F.silu(output if bias is None else output + bias), inputs[:, 1:]


def chunk_conv(x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolves the next T tokens of one sequence, see step_conv: x [T, C] and tail [taps - 1, C]."""
    inputs = torch.cat((tail, x))
    output = F.conv1d(inputs.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=weight.shape[0])
    return F.silu(output[0].t()), inputs[x.shape[0] :]
