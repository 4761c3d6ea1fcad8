"""The experts of a layer, once the router has chosen: a loop over the active ones, or grouped kernels on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.expert_blocks import GroupedLinear, block_rows, expert_blocks
from tandem.workers.models.activation import Activate
from tandem.workers.models.parameters import MoeParameters
from tandem.workers.models.projection import Projection

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], weights float32, experts int64 [T, top_k]) -> Σₖ weights[t, k] · expert experts[t, k] of x[t], [T, H]."""


def prepare_experts(parameters: MoeParameters, activate: Activate) -> Experts:
    if parameters.gate_up.weight.device.type == "cuda":
        from tandem.workers.kernels.triton.grouped import grouped_linear  # needs triton

        return GroupedExperts(parameters, activate, grouped_linear)
    return LoopedExperts(parameters, activate)


class LoopedExperts:
    """Tokens sorted by expert, and two products for each expert that has any. Reads the counts on the host."""

    def __init__(self, parameters: MoeParameters, activate: Activate) -> None:
        self._gate_up = _project(parameters.gate_up)
        self._activate = activate
        self._down = _project(parameters.down)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        top_k = experts.shape[1]
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self._down)).tolist()
        outputs = torch.empty(chosen.shape[0], x.shape[1], dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                pairs = order[begin : begin + count]
                intermediate = self._activate(self._gate_up[expert](x[pairs // top_k]))
                outputs[pairs] = self._down[expert](intermediate).float()
                begin += count
        return (outputs.view(*weights.shape, -1) * weights[:, :, None]).sum(1).to(x.dtype)


class GroupedExperts:
    """Two products over all experts at once, of tokens sorted into blocks of one expert each.

    Shapes depend on those of the arguments alone and nothing is read on the host, so that a CUDA graph can hold it.
    """

    def __init__(self, parameters: MoeParameters, activate: Activate, grouped_linear: GroupedLinear) -> None:
        self._parameters = parameters
        self._activate = activate
        self._grouped_linear = grouped_linear

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        parameters, top_k = self._parameters, experts.shape[1]
        num_experts = parameters.gate_up.weight.shape[0]
        blocks = expert_blocks(experts, num_experts, block_rows(experts.numel(), num_experts))
        hidden = self._activate(self._grouped_linear(x, parameters.gate_up, blocks, None, top_k))
        y = self._grouped_linear(hidden, parameters.down, blocks, weights.flatten(), 1)
        return y.view(x.shape[0], top_k, -1).sum(1)


def _project(experts: Linear) -> list[Projection]:
    biases = [None] * len(experts.weight) if experts.bias is None else experts.bias
    return [Projection(Linear(*of_expert)) for of_expert in zip(experts.weight, biases, strict=True)]
