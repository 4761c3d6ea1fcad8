"""The reference of GroupedLinear: a loop over blocks, in plain torch."""

import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.expert_blocks import ExpertBlocks


def grouped_linear(x: Tensor, weights: Linear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
    """See GroupedLinear. For tests: it reads the blocks on the host."""
    weight, bias = weights.weight, weights.bias
    y = torch.empty(blocks.num_pairs, weight.shape[1], dtype=torch.float32, device=x.device)
    for pairs, expert in zip(blocks.pairs.long(), blocks.experts.tolist(), strict=True):
        rows = pairs[pairs < blocks.num_pairs]
        if expert < weight.shape[0]:
            y[rows] = x[rows // fan_out].float() @ weight[expert].float().T
            if bias is not None:
                y[rows] += bias[expert].float()
    if scale is not None:
        y *= scale[:, None]
    return y.to(x.dtype)
