"""The decoder for few rows, where all that takes time is to read the weights."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.cache.plan.head_norm import HeadNorm
from tandem.workers.kernels.base import RowKernels, RowNorm
from tandem.workers.kernels.choice import choose_narrow_kernels, choose_row_launches
from tandem.workers.kernels.decode_megakernel.row_step import RowStep, RowStepLayer, RowStepShape
from tandem.workers.kernels.skinny_gemm.narrow_product import MOST_ROWS, NarrowKernels, NarrowShape
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
    """All layers of few rows are one kernel, see RowStep, where model, device and the step's pages allow it. Else one
    row, or some more of a narrow model (NarrowKernels), take four products and attention a layer: the norms ride on the
    products behind them, the sums with the residual on those before: see RowKernels.
    """

    def __init__(self, config: ModelConfig, kernels: RowKernels, final_norm: Tensor, lm_head: Tensor) -> None:
        self._config = config
        self._kernels = kernels
        self._final_norm = RowNorm(final_norm, config.rms_norm_eps)
        self._lm_head = lm_head
        self._layers: list[RowLayer] = []
        self._steps_over: dict[torch.dtype, dict[int, RowStep]] = {}

    @staticmethod
    def fits(config: ModelConfig, layer: LayerParameters) -> bool:
        """Whether it can compute a layer: K and V as wide as they are stored, a dense feed-forward with silu, and no
        norm behind a product."""
        return (
            isinstance(layer.attention, AttentionParameters)
            and config.stored_head_dim == config.head_dim
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

    def forward(self, x: Tensor, cached: CachedAttention) -> Tensor | None:
        """Logits [n, vocab_size] that follow the tokens with embeddings x [n, H], in its dtype; x is overwritten. None,
        and x as it was, where the decoder of any number of rows is to be taken."""
        rows, pages = x.shape[0], cached.step_pages()
        step = None if pages is None else self._steps(pages.pool.dtype).get(rows)
        if pages is not None and step is not None and step.takes(pages):
            return step(x, pages)
        kernels = self._kernels if rows == 1 else self._narrow if rows <= MOST_ROWS else None
        return None if kernels is None else self._forward_layers(kernels, x, cached)

    def _forward_layers(self, kernels: RowKernels, x: Tensor, cached: CachedAttention) -> Tensor:
        for index, layer in enumerate(self._layers):
            qkv = kernels.linear(x, layer.qkv, layer.qkv_bias, layer.input_norm)
            o = cached.attend(index, *split_heads(self._config, qkv), layer.sinks, layer.qk_norm)
            kernels.add_linear(x, o.flatten(1), layer.o, layer.o_bias)
            gated = layer.feed_forward
            inner = kernels.linear_silu_mul(x, gated.gate_up, gated.gate_up_bias, layer.post_norm)
            kernels.add_linear(x, inner, gated.down, gated.down_bias)
        return kernels.linear(x, self._lm_head, None, self._final_norm)

    def _steps(self, stored: torch.dtype) -> dict[int, RowStep]:
        """By number of rows, over a pool of such elements; made when first asked for, with all layers; may compile."""
        if stored not in self._steps_over:
            self._steps_over[stored] = self._make_steps(stored)
        return self._steps_over[stored]

    def _make_steps(self, stored: torch.dtype) -> dict[int, RowStep]:
        config, layers = self._config, [_step_layer(layer) for layer in self._layers]
        shape = RowStepShape(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            q_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=self._lm_head.shape[0],
            dtype=config.dtype,
            stored=stored,
        )
        fitting = [layer for layer in layers if layer is not None]
        if len(fitting) < len(layers) or self._final_norm.weight.dtype != config.dtype:
            return {}
        tensors = (fitting, self._final_norm.weight, self._lm_head)
        return {
            rows: RowStep(shape, rows, *tensors, config.rms_norm_eps, launch)
            for rows, launch in choose_row_launches(shape, self._lm_head.device).items()
        }

    @cached_property
    def _narrow(self) -> NarrowKernels | None:
        """Made when first asked for, with all layers; may compile."""
        config, (hidden, head_width) = self._config, self._layers[0].o.shape
        shape = NarrowShape(
            hidden=hidden,
            inner=config.intermediate_size,
            heads=head_width,
            qkv=self._layers[0].qkv.shape[0],
            dtype=config.dtype,
        )
        plain = [_step_layer(layer) is not None and layer.qkv_bias is None for layer in self._layers]
        return choose_narrow_kernels(shape, self._lm_head.device) if all(plain) else None


def _step_layer(layer: RowLayer) -> RowStepLayer | None:
    """None where it has what RowStep has not: biases behind attention, sinks, norms in float32."""
    feed_forward, norm = layer.feed_forward, layer.qk_norm
    others = (layer.sinks, layer.o_bias, feed_forward.gate_up_bias, feed_forward.down_bias)
    norms = (layer.input_norm.weight, layer.post_norm.weight, *(() if norm is None else (norm.weight,)))
    if any(other is not None for other in others) or any(one.dtype != layer.qkv.dtype for one in norms):
        return None
    return RowStepLayer(
        qkv=layer.qkv,
        qkv_bias=layer.qkv_bias,
        o=layer.o,
        gate_up=feed_forward.gate_up,
        down=feed_forward.down,
        input_norm=layer.input_norm.weight,
        post_norm=layer.post_norm.weight,
        head_norms=None if norm is None else norm.weight,
    )
