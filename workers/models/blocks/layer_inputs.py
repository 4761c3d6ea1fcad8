"""The inputs that each layer has of its own, next to the residual stream, and their use."""

import torch
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels
from tandem.workers.models.activation import choose_activation
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import LayerParameters, PerLayerTables


class PerLayerInputs:
    """(token embedding · √P + norm(projection of x · H^-½)) · 2^-½, of P numbers for each of L layers."""

    def __init__(self, config: ModelConfig, tables: PerLayerTables, kernels: LayerKernels) -> None:
        width = tables.norm.shape[0]
        self._shape = (config.num_layers, width)
        self._embedding = tables.embedding
        self._embedding_scale = float(torch.tensor(width**0.5, dtype=config.dtype))  # as transformers rounds it
        self._projection, self._scale = tables.projection.prepare(), config.hidden_size**-0.5
        self._norm = tables.norm.expand(self._shape).contiguous()
        self._kernels, self._eps = kernels, config.rms_norm_eps

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """Returns [T, L, P] of tokens, int64 [T], with embeddings x [T, H]."""
        projected = self._projection.linear(x).mul_(self._scale).unflatten(1, self._shape)
        normed = self._kernels.norm_heads(projected, self._norm, self._eps)
        of_tokens = self._embedding.look_up(token_ids).mul_(self._embedding_scale).unflatten(1, self._shape)
        return normed.add_(of_tokens).mul_(2**-0.5)


class LayerTail:
    """The end of a layer: adds its own input, gated by the residual stream, and multiplies the sum with a number."""

    def __init__(self, config: ModelConfig, layer: LayerParameters, kernels: LayerKernels) -> None:
        self._scalar, self._own = layer.scalar, layer.per_layer
        if layer.per_layer is not None:
            self._gate, self._projection = layer.per_layer.gate.prepare(), layer.per_layer.projection.prepare()
        self._activate = choose_activation(config.activation, kernels)
        self._kernels, self._eps = kernels, config.rms_norm_eps

    def __call__(self, x: Tensor, delta: Tensor, own_input: Tensor | None) -> None:
        """x [T, H], in place, becomes what the next layer takes; delta [T, H] is yet to be added. own_input: [T, P]."""
        x.add_(delta)
        if self._own is not None and own_input is not None:
            gated = self._activate(torch.cat((self._gate.linear(x), own_input), 1))
            x.add_(self._kernels.add_rms_norm(self._projection.linear(gated), None, self._own.norm, self._eps))
        if self._scalar is not None:
            x.mul_(self._scalar)
