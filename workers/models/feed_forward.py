"""The feed-forward of a layer: dense, or a mixture of experts. Either is a call x [T, H] → [T, H]."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.choice import choose_streamed_gemm
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.models.activation import Activation, Silu, choose_activation
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.experts import Experts, prepare_experts
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.parameters import GatedParameters, MoeParameters
from tandem.workers.models.routing import route
from tandem.workers.ranks.ranks import ALONE, Ranks, drop_bias, held_experts, prepare_summed

FeedForward = Callable[[Tensor], Tensor]


class GatedFeedForward:
    """down(activate(gate_up(x))). in_parts: the result is for LayerKernels.add_rms_norm, see Projection.in_parts."""

    def __init__(
        self,
        parameters: GatedParameters,
        activation: Activation,
        kernels: LayerKernels,
        ranks: Ranks = ALONE,
        *,
        in_parts: bool = False,
    ) -> None:
        """ranks: the ranks that add up their results."""
        self._gate_up = parameters.gate_up.prepare()
        self._activate = choose_activation(activation, kernels)
        self._down = prepare_summed(parameters.down, ranks)
        self._multiply_down = self._down.in_parts if in_parts else self._down.linear
        self._gated_gemm: StreamedGemm | None = None
        if isinstance(activation, Silu):
            self._gated_gemm = choose_streamed_gemm(parameters.gate_up.plain(), gated=True)

    @property
    def streamed_gemms(self) -> tuple[StreamedGemm | None, StreamedGemm | None]:
        """The GEMMs for the rows of a decode step: gate and up, and down."""
        return self._gated_gemm, self._down.streamed_gemm

    def __call__(self, x: Tensor) -> Tensor:
        if self._gated_gemm is not None and self._gated_gemm.takes(x) and not self._gate_up.is_adapted:
            return self._multiply_down(self._gated_gemm(x))
        return self._multiply_down(self._activate(self._gate_up.linear(x)))


class MixtureOfExperts:
    """The weighted sum of the chosen experts' gated feed-forwards, and of the expert that all tokens share."""

    def __init__(
        self,
        moe: MoeConfig,
        parameters: MoeParameters,
        activation: Activation,
        kernels: LayerKernels,
        ranks: Ranks = ALONE,
        held: range | None = None,
    ) -> None:
        """held: the experts that this rank has; None: all."""
        self._sum = ranks.sum
        self._numbers = None if ranks.size == 1 or held is None else held_experts(held)
        if parameters.shared is not None:
            drop_bias(parameters.shared.down, ranks)  # its part is summed with that of the experts
        self._routing = moe.routing
        self._router = parameters.router
        self._correction = parameters.correction
        self._shared = None if parameters.shared is None else GatedFeedForward(parameters.shared, activation, kernels)
        activate = choose_activation(activation, kernels)
        self._experts: Experts = prepare_experts(parameters, activate, alone=self._numbers is None)
        self._shared_gate = None if parameters.shared_gate is None else parameters.shared_gate.prepare()
        if parameters.from_latent is not None:
            drop_bias(parameters.from_latent, ranks)
        maps = parameters.into_latent, parameters.from_latent
        self._into_latent, self._from_latent = (None if one is None else one.prepare() for one in maps)
        self._factors = parameters.factors
        self._table = parameters.table
        if self._table is not None:
            least, most, last = int(self._table.min()), int(self._table.max()), moe.num_experts - 1
            if least < 0 or most > last:
                raise InvalidWeights(f"the experts of token ids are {least} … {most}; they must be from 0 to {last}")

    def __call__(self, x: Tensor, routed: Tensor | None = None, *, token_ids: Tensor | None = None) -> Tensor:
        """routed: what the router takes, [T, H]; None: x. token_ids: int64 [T], for layers that choose by them."""
        routed = (x if routed is None else routed).to(self._router.dtype)
        logits = self._router.linear(routed)
        by_table = None if self._table is None or token_ids is None else self._table[token_ids]
        weights, experts = route(logits, self._routing, self._correction, by_table)
        if self._factors is not None:
            weights = weights * self._factors[experts]
        experts = experts if self._numbers is None else self._numbers(experts)
        chosen = self._compute(x, weights, experts)
        return self._sum(chosen if self._shared is None else chosen.add_(self._gated(self._shared(x), x)))

    def _compute(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if self._routing.scales_input:
            return self._scaled(x, weights, experts)
        if self._into_latent is None or self._from_latent is None:
            return self._experts(x, weights, experts)
        return self._from_latent.linear(self._experts(self._into_latent.linear(x), weights, experts))

    def _gated(self, shared: Tensor, x: Tensor) -> Tensor:
        return shared if self._shared_gate is None else shared * self._shared_gate.linear(x).sigmoid()

    def _scaled(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """See Routing.scales_input. Each of a token's top_k inputs counts as a token."""
        inputs = (x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(2)).flatten(0, 1)
        outputs = self._experts(inputs, torch.ones_like(weights).view(-1, 1), experts.view(-1, 1))
        return outputs.view(*weights.shape, -1).sum(1)


def prepare_feed_forward(
    config: ModelConfig,
    parameters: GatedParameters | MoeParameters,
    kernels: LayerKernels,
    ranks: Ranks,
    *,
    in_parts: bool,
) -> FeedForward:
    """in_parts: see GatedFeedForward; nothing stands between the result and a sum with the residual."""
    if isinstance(parameters, GatedParameters):
        return GatedFeedForward(parameters, config.activation, kernels, ranks, in_parts=in_parts)
    assert config.moe is not None  # parameters of experts come from it
    return MixtureOfExperts(config.moe, parameters, config.activation, kernels, ranks, config.experts)
