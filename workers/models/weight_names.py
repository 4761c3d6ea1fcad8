"""Hugging Face's weight names, and the views of the parameters that the tensors of a checkpoint fill."""

import re
from collections.abc import Collection

from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.models.compressed.parameters import SharedParameters
from tandem.workers.models.compressed.weight_names import (
    gated_weights,
    hyper_head_weights,
    hyper_weights,
    shared_weights,
)
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.latent import LatentConfig
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.parameters import (
    AttentionParameters,
    BesideParameters,
    CrossParameters,
    DecoderParameters,
    GatedParameters,
    IndexParameters,
    LatentParameters,
    LayerNorms,
    LayerParameters,
    MoeParameters,
)

NORM = re.compile(r"norm(?:_\d)?\.weight$")
FACTORS = ("layer_scalar", "router.scale", "router.per_expert_scale")
Parts = tuple[tuple[str, int], ...]
"""Names and numbers of rows of the tensors that one fused tensor takes."""


def named_weights(
    config: ModelConfig, parameters: DecoderParameters, stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Hugging Face's tensor names and, for each, the contiguous view of `parameters` that it fills.

    stored: the names that the checkpoint has; they decide where there is more than one layout of a family.
    """
    root = config.weight_root
    weights = {f"{root}.embed_tokens.weight": parameters.embedding, f"{root}.norm.weight": parameters.final_norm}
    if parameters.lm_head is not parameters.embedding:
        weights[config.lm_head_name] = parameters.lm_head
    if parameters.encoder is not None and config.encoder is not None:
        weights |= named_weights(config.encoder, parameters.encoder, stored)
    joined = any(name.endswith(".experts.gate_up_proj") for name in stored)
    if parameters.per_layer is not None:
        weights["model.embed_tokens_per_layer.weight"] = parameters.per_layer.embedding
        weights["model.per_layer_projection_norm.weight"] = parameters.per_layer.norm
        weights |= _linear("model.per_layer_model_projection", parameters.per_layer.projection)
    if parameters.hyper_head is not None:
        weights |= hyper_head_weights(parameters.hyper_head)
    for index, layer in enumerate(parameters.layers):
        weights.update(layer_weights(config, index, layer, f"{root}.layers.{index}", joined))
    return weights


def layer_weights(
    config: ModelConfig, index: int, layer: LayerParameters, prefix: str, joined: bool
) -> dict[str, Tensor]:
    """Those of layer `index`. joined: whether the experts' are in one tensor each."""
    if isinstance(layer.attention, SharedParameters):
        return _published_weights(config, layer, layer.attention, prefix)
    weights = _norm_weights(config, layer.norms, prefix)
    attention = f"{prefix}.self_attn"
    if isinstance(layer.attention, AttentionParameters):
        weights.update(_attention_weights(config, index, layer.attention, attention))
    else:
        assert config.latent is not None  # else the layer had no latents
        weights.update(_latent_weights(config.latent, layer.attention, attention))
    feed_forward = layer.feed_forward
    if isinstance(feed_forward, GatedParameters):
        weights.update(_gated_weights(config, feed_forward, f"{prefix}.{config.feed_forward_block}"))
    else:
        assert config.moe is not None  # else the layer had no experts
        weights.update(_moe_weights(config, config.moe, feed_forward, prefix, joined))
    if layer.beside is not None and config.moe is not None:
        weights.update(_beside_weights(config, config.moe, layer.beside, prefix))
    weights.update(_tail_weights(layer, prefix))
    if layer.cross is not None:
        weights.update(_cross_weights(layer.cross, prefix))
    return weights


def _published_weights(
    config: ModelConfig, layer: LayerParameters, attention: SharedParameters, prefix: str
) -> dict[str, Tensor]:
    """Those of a layer of DeepSeek-V4, which transformers also writes by the names that are published."""
    weights = {
        f"{prefix}.attn_norm.weight": layer.norms.before_attention,
        f"{prefix}.ffn_norm.weight": layer.norms.before_feed_forward,
        **shared_weights(f"{prefix}.attn", attention),
    }
    if layer.hyper is not None:
        weights |= hyper_weights(prefix, layer.hyper)
    moe, block = layer.feed_forward, f"{prefix}.ffn"
    assert isinstance(moe, MoeParameters)  # every layer has experts
    gate = {"weight": moe.router.weight, "bias": moe.correction, "tid2eid": moe.table}
    weights |= _existing({f"{block}.gate.{name}": tensor for name, tensor in gate.items()})
    if moe.shared is not None:
        weights |= gated_weights(f"{block}.shared_experts", moe.shared.gate_up, moe.shared.down)
    for index, expert in enumerate(config.experts):
        own = Linear(moe.gate_up.weight[index]), Linear(moe.down.weight[index])
        weights |= gated_weights(f"{block}.experts.{expert}", *own)
    return weights


def is_norm(name: str) -> bool:
    return NORM.search(name) is not None


def is_factor(name: str) -> bool:
    """Whether the tensor only multiplies, and is no norm's."""
    return name.endswith(FACTORS)


def _norm_weights(config: ModelConfig, norms: LayerNorms, prefix: str) -> dict[str, Tensor]:
    before, behind = "input_layernorm", "post_attention_layernorm"
    post_norm = "pre_feedforward_layernorm" if config.out_norms else behind
    if config.self_attn_norms:
        before, behind = "pre_self_attn_layernorm", "post_self_attn_layernorm"
    return _existing(
        {
            f"{prefix}.{before}.weight": norms.before_attention,
            f"{prefix}.{behind}.weight": norms.behind_attention,
            f"{prefix}.{post_norm}.weight": norms.before_feed_forward,
            f"{prefix}.post_feedforward_layernorm.weight": norms.behind_feed_forward,
        }
    )


def _attention_weights(
    config: ModelConfig, layer: int, parameters: AttentionParameters, prefix: str
) -> dict[str, Tensor]:
    weights = _existing(
        {
            f"{prefix}.q_norm.weight": parameters.q_norm,
            f"{prefix}.k_norm.weight": parameters.k_norm,
            f"{prefix}.sinks": parameters.sinks,
        }
    )
    rows = [heads * config.heads_of(layer).head_dim for heads in config.qkv_heads(layer)]
    separate = tuple(zip(("q_proj", "k_proj", "v_proj"), rows, strict=False))
    parts = (("qkv_proj", sum(rows)),) if config.fused_names else separate
    return weights | _linear(f"{prefix}.o_proj", parameters.o) | _split_linear(prefix, parameters.qkv, parts)


def _latent_weights(latent: LatentConfig, parameters: LatentParameters, prefix: str) -> dict[str, Tensor]:
    entry_rows = latent.rank + latent.rotated
    q_rows = parameters.down.weight.shape[0] - entry_rows
    weights = _existing(
        {
            f"{prefix}.q_a_layernorm.weight": parameters.q_norm,
            f"{prefix}.q_b_proj.weight": parameters.q_up,
            f"{prefix}.kv_a_layernorm.weight": parameters.latent_norm,
            f"{prefix}.kv_b_proj.weight": parameters.up.flatten(0, 1),
        }
    )
    parts = (("q_proj" if latent.q_rank is None else "q_a_proj", q_rows), ("kv_a_proj_with_mqa", entry_rows))
    weights |= _linear(f"{prefix}.o_proj", parameters.o) | _split_linear(prefix, parameters.down, parts)
    weights.pop(f"{prefix}.q_proj.bias", None)  # q's only map has none
    return weights if parameters.index is None else weights | _index_weights(parameters.index, f"{prefix}.indexer")


def _index_weights(parameters: IndexParameters, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}.wq_b.weight": parameters.q_up,
        f"{prefix}.wk.weight": parameters.key,
        **_linear(f"{prefix}.k_norm", parameters.key_norm),
        f"{prefix}.weights_proj.weight": parameters.weights,
    }


def _gated_weights(config: ModelConfig, gated: GatedParameters, prefix: str) -> dict[str, Tensor]:
    rows = gated.down.weight.shape[1]
    parts = (("gate_up_proj", 2 * rows),) if config.fused_names else (("gate_proj", rows), ("up_proj", rows))
    return _linear(f"{prefix}.down_proj", gated.down) | _split_linear(prefix, gated.gate_up, parts)


def _moe_weights(
    config: ModelConfig, moe: MoeConfig, parameters: MoeParameters, prefix: str, joined: bool
) -> dict[str, Tensor]:
    """joined: one tensor for all experts of a layer."""
    names = moe.names
    block = f"{prefix}.mlp" if joined and names.projections is not None else f"{prefix}.{names.block}".rstrip(".")
    router, experts = f"{block}.{names.router}", f"{block}.experts"
    weights = _linear(router, parameters.router)
    weights |= _existing({f"{router}.e_score_correction_bias": parameters.correction})
    if parameters.shared is not None:
        weights |= _gated_weights(config, parameters.shared, f"{block}.{names.shared}")
    if names.projections is None or joined:
        for name, linear in (("gate_up_proj", parameters.gate_up), ("down_proj", parameters.down)):
            weight = linear.weight.transpose(1, 2) if names.transposed else linear.weight
            weights |= _existing({f"{experts}.{name}": weight, f"{experts}.{name}_bias": linear.bias})
        return weights
    gate, up, down = names.projections
    parts = ((gate, moe.intermediate_size), (up, moe.intermediate_size))
    for index, expert in enumerate(config.experts):
        weights |= _split_linear(f"{experts}.{expert}", Linear(parameters.gate_up.weight[index]), parts)
        weights[f"{experts}.{expert}.{down}.weight"] = parameters.down.weight[index]
    return weights


def _beside_weights(config: ModelConfig, moe: MoeConfig, beside: BesideParameters, prefix: str) -> dict[str, Tensor]:
    norms = {
        f"{prefix}.router.scale": beside.router_scale,
        f"{prefix}.pre_feedforward_layernorm_2.weight": beside.before,
        f"{prefix}.post_feedforward_layernorm_2.weight": beside.behind,
        f"{prefix}.post_feedforward_layernorm_1.weight": beside.behind_dense,
    }
    factors = {f"{prefix}.router.per_expert_scale": beside.moe.factors}
    return norms | _existing(factors) | _moe_weights(config, moe, beside.moe, prefix, joined=True)


def _tail_weights(layer: LayerParameters, prefix: str) -> dict[str, Tensor]:
    weights = _existing({f"{prefix}.layer_scalar": layer.scalar})
    if layer.per_layer is None:
        return weights
    weights[f"{prefix}.post_per_layer_input_norm.weight"] = layer.per_layer.norm
    weights |= _linear(f"{prefix}.per_layer_input_gate", layer.per_layer.gate)
    return weights | _linear(f"{prefix}.per_layer_projection", layer.per_layer.projection)


def _cross_weights(cross: CrossParameters, prefix: str) -> dict[str, Tensor]:
    attention, rows = f"{prefix}.cross_attn", cross.kv.weight.shape[0] // 2
    return {
        f"{prefix}.pre_cross_attn_layernorm.weight": cross.before,
        f"{prefix}.post_cross_attn_layernorm.weight": cross.behind,
        **_linear(f"{attention}.q_proj", cross.q),
        **_linear(f"{attention}.o_proj", cross.o),
        **_split_linear(attention, cross.kv, (("k_proj", rows), ("v_proj", rows))),
    }


def _existing(weights: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


def _linear(name: str, linear: Linear) -> dict[str, Tensor]:
    return _existing({f"{name}.weight": linear.weight, f"{name}.bias": linear.bias})


def _split_linear(prefix: str, fused: Linear, parts: Parts) -> dict[str, Tensor]:
    """The rows of each part."""
    counts = [count for _, count in parts]
    return {
        f"{prefix}.{name}.{kind}": rows
        for kind, tensor in _existing({"weight": fused.weight, "bias": fused.bias}).items()
        for (name, _), rows in zip(parts, tensor.split(counts), strict=True)
    }
