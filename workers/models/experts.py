"""The experts of a layer, once the router has chosen: a loop over the active ones, or grouped kernels on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.workers.kernels.choice import sort_by_expert
from tandem.workers.kernels.expert_blocks import block_rows
from tandem.workers.models.activation import Activate
from tandem.workers.models.parameters import MoeParameters
from tandem.workers.weights.weight import Projection, WeightStack

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], weights float32, experts int64 [T, top_k]) -> Σₖ weights[t, k] · expert experts[t, k] of x[t], [T, H]."""


def prepare_experts(parameters: MoeParameters, activate: Activate, *, alone: bool = True) -> Experts:
    """alone: no other rank has experts of this layer."""
    if parameters.gate_up.device.type == "cuda":
        return GroupedExperts(parameters, activate, alone=alone)
    return LoopedExperts(parameters, activate)


class LoopedExperts:
    """Tokens sorted by expert, and two products for each expert that has any. Reads the counts on the host.

    Number L of L experts stands for one that another rank has, and adds nothing.
    """

    def __init__(self, parameters: MoeParameters, activate: Activate) -> None:
        self._gate_up = _prepare(parameters.gate_up)
        self._activate = activate
        self._down = _prepare(parameters.down)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        top_k = experts.shape[1]
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self._down)).tolist()[: len(self._down)]
        outputs = torch.zeros(chosen.shape[0], x.shape[1], dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                pairs = order[begin : begin + count]
                intermediate = self._activate(self._gate_up[expert].linear(x[pairs // top_k]))
                outputs[pairs] = self._down[expert].linear(intermediate).float()
                begin += count
        return (outputs.view(*weights.shape, -1) * weights[:, :, None]).sum(1).to(x.dtype)


class GroupedExperts:
    """Two products over all experts at once, of tokens sorted into blocks of one expert each.

    Number L of L experts stands for another rank's expert, as for LoopedExperts: it has blocks, which no kernel
    computes. Shapes depend on the arguments' shapes, and nothing is read on the host, so that a CUDA graph can hold it.
    """

    def __init__(self, parameters: MoeParameters, activate: Activate, *, alone: bool = True) -> None:
        """alone: no other rank has experts of this layer."""
        self._gate_up, self._down = parameters.gate_up.prepare_grouped(), parameters.down.prepare_grouped()
        self._activate, self._count, self._alone = activate, parameters.down.count, alone

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        top_k, held = experts.shape[1], self._count
        blocks = sort_by_expert(experts, held + (not self._alone), block_rows(experts.numel(), held))
        hidden = self._activate(self._gate_up(x, blocks, None, top_k))
        y = self._down(hidden, blocks, weights.flatten(), 1).view(x.shape[0], top_k, -1)
        return (y if self._alone else y.where((experts < held)[:, :, None], 0)).sum(1)


def _prepare(experts: WeightStack) -> list[Projection]:
    return [experts.one(index).prepare() for index in range(experts.count)]
