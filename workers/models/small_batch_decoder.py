"""The decoder for few rows: reading the weights takes nearly all of its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from tandem.cache.plan.head_norm import HeadNorm
from tandem.workers.kernels.base import FusedGemms, Linear, RmsNorm
from tandem.workers.kernels.choice import choose_megakernels, choose_resident_gemms
from tandem.workers.kernels.decode_megakernel.megakernel import DecodeMegakernel, MegakernelLayer, MegakernelShape
from tandem.workers.kernels.skinny_gemm.resident import MAX_ROWS, ResidentGemms, ResidentShape
from tandem.workers.models.activation import Silu
from tandem.workers.models.attention import AttentionBlock, GroupedQueryAttention, split_heads
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import AttentionParameters, GatedParameters, LayerParameters


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The parameters of one layer; the weights are those that the other rows' decoder has."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm: HeadNorm | None
    sinks: Tensor | None
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear


class SmallBatchDecoder:
    """The DecodeMegakernel computes all layers in one launch where model, device and the step's pages allow it.

    Other steps of one row, or of some rows of a narrow model (ResidentGemms), take four GEMMs and attention a layer.
    The norms are in the GEMMs after them, the sums with the residual in those before: see FusedGemms.
    """

    def __init__(self, config: ModelConfig, kernels: FusedGemms, final_norm: Tensor, lm_head: Linear) -> None:
        self._config = config
        self._kernels = kernels
        self._final_norm = RmsNorm(final_norm, config.rms_norm_eps)
        self._lm_head = lm_head
        self._layers: list[FusedLayer] = []
        # By the dtype of the stored K and V; made when first asked for, with all layers.
        self._megakernels = cache(self._make_megakernels)

    @staticmethod
    def fits(config: ModelConfig, layer: LayerParameters) -> bool:
        """Whether it can compute a layer: weights that are plain or in 8 bits, K and V as wide as they are stored, a
        dense feed-forward with silu, and no norm after a product."""
        return (
            isinstance(layer.attention, AttentionParameters)
            and config.chunked is None
            and not config.gated_output
            and config.full_heads is None
            and not config.value_norm
            and not config.num_readers
            and config.per_layer is None
            and not config.layer_scalars
            and config.stored_head_dim(config.head_dim) == config.head_dim
            and isinstance(layer.feed_forward, GatedParameters)
            and isinstance(config.activation, Silu)
            and layer.norms.behind_attention is None
            and layer.norms.behind_feed_forward is None
            and len(_plain(layer.attention, layer.feed_forward)) == 4
        )

    def add_layer(self, layer: LayerParameters, block: AttentionBlock) -> None:
        """The next layer, one that fits; block: its attention for other rows."""
        assert isinstance(layer.attention, AttentionParameters)
        assert isinstance(block, GroupedQueryAttention)
        assert isinstance(layer.feed_forward, GatedParameters)
        qkv, o, gate_up, down = _plain(layer.attention, layer.feed_forward)
        before, behind = (
            RmsNorm(weight, self._config.rms_norm_eps)
            for weight in (layer.norms.before_attention, layer.norms.before_feed_forward)
        )
        sinks = layer.attention.sinks
        self._layers.append(FusedLayer(before, qkv, block.qk_norm, sinks, o, behind, gate_up, down))

    def forward(
        self, x: Tensor, cached: CachedAttention, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None] | None:
        """Logits [n, vocab_size] that follow the tokens with embeddings x [n, H], in its dtype; x is overwritten. And
        what the layers `taps`, not the first, take from those before, [n, taps · H], one after another. None, and x
        as it was, where the decoder of any number of rows is to be taken."""
        rows, pages = x.shape[0], cached.step_pages(range(self._config.num_layers))
        megakernel = None if pages is None else self._megakernels(pages.pool.dtype).get(rows)
        if pages is not None and megakernel is not None and megakernel.takes(pages):
            return megakernel(x, pages, taps)
        kernels = self._kernels if rows == 1 else self._resident if rows <= MAX_ROWS else None
        return None if kernels is None else self._forward_layers(kernels, x, cached, taps)

    def _forward_layers(
        self, kernels: FusedGemms, x: Tensor, cached: CachedAttention, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        tapped = []
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped.append(x.clone())
            qkv = kernels.linear(x, layer.qkv, layer.input_norm)
            q, k, v = split_heads(qkv, self._config.head_dim, self._config.qkv_heads(index))
            o = cached.attend(index, q, k, v, layer.sinks, layer.qk_norm)
            kernels.add_linear(x, o.flatten(1), layer.o)
            intermediate = kernels.linear_silu_mul(x, layer.gate_up, layer.post_norm)
            kernels.add_linear(x, intermediate, layer.down)
        return kernels.linear(x, self._lm_head, self._final_norm), torch.cat(tapped, 1) if tapped else None

    def _make_megakernels(self, stored: torch.dtype) -> dict[int, DecodeMegakernel]:
        """Makes the megakernels by number of rows; may compile."""
        config, lm_head = self._config, self._lm_head.weight
        layers = [made for layer in self._layers if (made := _megakernel_layer(layer, config.dtype)) is not None]
        of_weights = {layer.qkv.dtype for layer in layers}
        others = {self._final_norm.weight.dtype, lm_head.dtype}
        if len(layers) < len(self._layers) or len(of_weights) != 1 or others != {config.dtype}:
            return {}
        shape = megakernel_shape(config, stored, of_weights.pop())
        return {
            rows: DecodeMegakernel(shape, rows, layers, self._final_norm, lm_head, launch)
            for rows, launch in choose_megakernels(shape, lm_head.device).items()
        }

    @cached_property
    def _resident(self) -> ResidentGemms | None:
        """The resident GEMMs, made when first asked for; may compile."""
        config, first = self._config, self._layers[0]
        (hidden, heads), qkv = first.o.weight.shape, first.qkv.weight.shape[0]
        shape = ResidentShape(hidden, config.intermediate_size, heads, qkv, config.dtype)
        layers = [_megakernel_layer(one, config.dtype) for one in self._layers]
        plain = [one is not None and one.qkv_bias is None and one.qkv.dtype == config.dtype for one in layers]
        return choose_resident_gemms(shape, self._lm_head.weight.device) if all(plain) else None


def megakernel_shape(config: ModelConfig, stored: torch.dtype, weights: torch.dtype) -> MegakernelShape:
    """stored: dtype of K and V in their pages. weights: of the layers'."""
    return MegakernelShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        q_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        dtype=config.dtype,
        weights=weights,
        stored=stored,
    )


def _megakernel_layer(layer: FusedLayer, dtype: torch.dtype) -> MegakernelLayer | None:
    """None where it has what DecodeMegakernel has not: sinks, norms in another dtype, other products."""
    head_norms = None if layer.qk_norm is None else layer.qk_norm.weight
    norms = (layer.input_norm.weight, layer.post_norm.weight, head_norms)
    if layer.sinks is not None or any(norm is not None and norm.dtype != dtype for norm in norms):
        return None
    return MegakernelLayer.of((layer.qkv, layer.o, layer.gate_up, layer.down), *norms)


def _plain(attention: AttentionParameters, feed_forward: GatedParameters) -> list[Linear]:
    """Returns qkv, o, gate and up, down; fewer where memory does not hold one as such."""
    weights = (attention.qkv, attention.o, feed_forward.gate_up, feed_forward.down)
    return [plain for one in weights if (plain := one.plain()) is not None]
