"""Experts next to the dense feed-forward of a layer (Gemma 4)."""

from torch import Tensor

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.feed_forward import MixtureOfExperts
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.parameters import BesideParameters
from tandem.workers.ranks.ranks import Ranks


class ExpertsBeside:
    """See BesideParameters."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, parameters: BesideParameters, kernels: LayerKernels, ranks: Ranks
    ) -> None:
        self._kernels, self._eps = kernels, config.rms_norm_eps
        self._experts = MixtureOfExperts(moe, parameters.moe, config.activation, kernels, ranks, config.experts)
        self._router_norm = parameters.router_scale * config.hidden_size**-0.5
        self._parameters = parameters

    def __call__(self, x: Tensor, dense: Tensor) -> Tensor:
        """The sum of both: x is the residual stream, dense the output of the dense feed-forward, [T, H] each."""
        before, behind, behind_dense = self._parameters.before, self._parameters.behind, self._parameters.behind_dense
        chosen = self._experts(self._norm(x, before), self._norm(x, self._router_norm))
        return self._norm(dense, behind_dense).add_(self._norm(chosen, behind))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.add_rms_norm(x, None, weight, self._eps)
