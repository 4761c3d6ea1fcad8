"""The feed-forward of a layer: dense, or a mixture of experts. Either is a call x [T, H] → [T, H]."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.models.activation import Activate
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.experts import Experts, prepare_experts
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.parameters import GatedParameters, MoeParameters
from tandem.workers.models.projection import Projection
from tandem.workers.models.routing import route

FeedForward = Callable[[Tensor], Tensor]


class GatedFeedForward:
    """down(activate(gate_up(x)))."""

    def __init__(self, parameters: GatedParameters, activate: Activate) -> None:
        self._gate_up = Projection(parameters.gate_up, parameters.gate_up_bias)
        self._activate = activate
        self._down = Projection(parameters.down, parameters.down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))


class MixtureOfExperts:
    """The weighted sum of the chosen experts' gated feed-forwards, and that of the one that all tokens share."""

    def __init__(self, moe: MoeConfig, parameters: MoeParameters, activate: Activate) -> None:
        self._routing = moe.routing
        self._router, self._router_bias = parameters.router, parameters.router_bias
        self._correction = parameters.correction
        self._shared = None if parameters.shared is None else GatedFeedForward(parameters.shared, activate)
        self._experts: Experts = prepare_experts(parameters, activate)

    def __call__(self, x: Tensor) -> Tensor:
        logits = F.linear(x.to(self._router.dtype), self._router, self._router_bias)
        chosen = self._experts(x, *route(logits, self._routing, self._correction))
        return chosen if self._shared is None else chosen.add_(self._shared(x))


def prepare_feed_forward(
    config: ModelConfig, parameters: GatedParameters | MoeParameters, kernels: LayerKernels
) -> FeedForward:
    activate = config.activation.bind(kernels)
    if isinstance(parameters, GatedParameters):
        return GatedFeedForward(parameters, activate)
    assert config.moe is not None  # parameters of experts come from it
    return MixtureOfExperts(config.moe, parameters, activate)
