"""The decoder for one token, where all that takes time is to read the weights: four products and attention a layer."""

from dataclasses import dataclass

from torch import Tensor

from tandem.cache.head_norm import HeadNorm
from tandem.workers.kernels.base import RowKernels, RowNorm
from tandem.workers.models.activation import Silu
from tandem.workers.models.attention import AttentionBlock, CachedAttention, GroupedQueryAttention, split_heads
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import AttentionParameters, GatedParameters, LayerParameters


@dataclass(frozen=True, slots=True)
class RowLayer:
    """The parameters of one layer; the weights are those that the other rows' decoder has."""

    input_norm: RowNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: HeadNorm | None
    sinks: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: RowNorm
    feed_forward: GatedParameters


class RowDecoder:
    """The norms ride on the products behind them, the sums with the residual on those before: see RowKernels."""

    def __init__(self, config: ModelConfig, kernels: RowKernels, final_norm: Tensor, lm_head: Tensor) -> None:
        self._config = config
        self._kernels = kernels
        self._final_norm = RowNorm(final_norm, config.rms_norm_eps)
        self._lm_head = lm_head
        self._layers: list[RowLayer] = []

    @staticmethod
    def fits(config: ModelConfig, layer: LayerParameters) -> bool:
        """Whether it can compute a layer: K and V, a dense feed-forward with silu, and no norm behind a product."""
        return (
            isinstance(layer.attention, AttentionParameters)
            and isinstance(layer.feed_forward, GatedParameters)
            and isinstance(config.activation, Silu)
            and layer.attention_out_norm is None
            and layer.feed_forward_out_norm is None
        )

    def add_layer(self, layer: LayerParameters, block: AttentionBlock) -> None:
        """The next layer, one that fits; block: its attention for other rows."""
        attention = layer.attention
        assert isinstance(attention, AttentionParameters)
        assert isinstance(block, GroupedQueryAttention)
        assert isinstance(layer.feed_forward, GatedParameters)
        eps = self._config.rms_norm_eps
        self._layers.append(
            RowLayer(
                input_norm=RowNorm(layer.input_norm, eps),
                qkv=attention.qkv,
                qkv_bias=attention.qkv_bias,
                qk_norm=block.qk_norm,
                sinks=attention.sinks,
                o=attention.o,
                o_bias=attention.o_bias,
                post_norm=RowNorm(layer.post_norm, eps),
                feed_forward=layer.feed_forward,
            )
        )

    def forward(self, x: Tensor, cached: CachedAttention) -> Tensor:
        """Logits [1, vocab_size] that follow the token with embedding x [1, H], in its dtype; x is overwritten."""
        kernels = self._kernels
        for index, layer in enumerate(self._layers):
            qkv = kernels.linear(x, layer.qkv, layer.qkv_bias, layer.input_norm)
            o = cached.attend(index, *split_heads(self._config, qkv), layer.sinks, layer.qk_norm)
            kernels.add_linear(x, o.flatten(1), layer.o, layer.o_bias)
            gated = layer.feed_forward
            inner = kernels.linear_silu_mul(x, gated.gate_up, gated.gate_up_bias, layer.post_norm)
            kernels.add_linear(x, inner, gated.down, gated.down_bias)
        return kernels.linear(x, self._lm_head, None, self._final_norm)
