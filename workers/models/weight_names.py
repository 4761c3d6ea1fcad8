"""Hugging Face's weight names, and the views of the parameters that the tensors of a checkpoint fill."""

import re
from collections.abc import Collection

from torch import Tensor

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
    AnyAttention,
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
from tandem.workers.models.recurrent.parameters import RecurrentParameters, recurrent_weights
from tandem.workers.weights.weight import split_weights

NORM = re.compile(r"norm(?:_\d|_f|_embedding|_hidden)?\.weight$")
FACTORS = ("layer_scalar", "router.scale", "router.per_expert_scale", "linear_attn.norm.weight")


def named_weights(
    config: ModelConfig, parameters: DecoderParameters, stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Hugging Face's tensor names and, for each, the contiguous view of `parameters` that it fills.

    stored: the names that the checkpoint has; they decide where there is more than one layout of a family.
    """
    root = config.weight_root
    embedding, norm = config.end_names
    weights = parameters.embedding.named(f"{root}.{embedding}") | {f"{root}.{norm}.weight": parameters.final_norm}
    if parameters.lm_head is not parameters.embedding:
        weights |= parameters.lm_head.named(config.lm_head_name.removesuffix(".weight"))
    if parameters.encoder is not None and config.encoder is not None:
        weights |= named_weights(config.encoder, parameters.encoder, stored)
    joined = any(name.endswith(".experts.gate_up_proj") for name in stored)
    if parameters.per_layer is not None:
        weights |= parameters.per_layer.embedding.named("model.embed_tokens_per_layer")
        weights["model.per_layer_projection_norm.weight"] = parameters.per_layer.norm
        weights |= parameters.per_layer.projection.named("model.per_layer_model_projection")
    if parameters.hyper_head is not None:
        weights |= hyper_head_weights(parameters.hyper_head)
    for index, layer in enumerate(parameters.layers):
        weights.update(layer_weights(config, index, layer, f"{root}.layers.{index}", joined))
    return weights


def layer_weights(
    config: ModelConfig, index: int, layer: LayerParameters, prefix: str, joined: bool
) -> dict[str, Tensor]:
    """Returns the weights of layer `index` by name. joined: whether the experts' are in one tensor each."""
    if isinstance(layer.attention, SharedParameters):
        return _published_weights(config, layer, layer.attention, prefix)
    weights = _norm_weights(config, layer.norms, prefix)
    if layer.attention is not None:
        weights.update(_mixer_weights(config, index, layer.attention, prefix))
    if isinstance(layer.feed_forward, GatedParameters):
        weights.update(_gated_weights(config, layer.feed_forward, f"{prefix}.{config.feed_forward_block}"))
    elif layer.feed_forward is not None:
        assert config.moe is not None  # else the layer had no experts
        weights.update(_moe_weights(config, config.moe, layer.feed_forward, prefix, joined))
    if layer.beside is not None and config.moe is not None:
        weights.update(_beside_weights(config, config.moe, layer.beside, prefix))
    weights.update(_tail_weights(layer, prefix))
    if layer.cross is not None:
        weights.update(_cross_weights(layer.cross, prefix))
    return weights


def _mixer_weights(config: ModelConfig, layer: int, parameters: AnyAttention, prefix: str) -> dict[str, Tensor]:
    if isinstance(parameters, RecurrentParameters):
        assert config.recurrent is not None  # else the layer had no state
        return recurrent_weights(config.recurrent, parameters, f"{prefix}.{config.recurrent.block}")
    attention = f"{prefix}.{config.attention_block}"
    if isinstance(parameters, AttentionParameters):
        return _attention_weights(config, layer, parameters, attention)
    assert isinstance(parameters, LatentParameters)  # _published_weights has the others
    assert config.latent is not None  # else the layer had no latents
    return _latent_weights(config.latent, parameters, attention)


def _published_weights(
    config: ModelConfig, layer: LayerParameters, attention: SharedParameters, prefix: str
) -> dict[str, Tensor]:
    """Returns the weights of a layer of DeepSeek-V4, which transformers also writes under the published names."""
    weights = {
        f"{prefix}.attn_norm.weight": layer.norms.before_attention,
        f"{prefix}.ffn_norm.weight": layer.norms.before_feed_forward,
        **shared_weights(f"{prefix}.attn", attention),
    }
    if layer.hyper is not None:
        weights |= hyper_weights(prefix, layer.hyper)
    moe, block = layer.feed_forward, f"{prefix}.ffn"
    assert isinstance(moe, MoeParameters)  # every layer has experts
    gate = moe.router.named(f"{block}.gate") | {
        f"{block}.gate.bias": moe.correction,
        f"{block}.gate.tid2eid": moe.table,
    }
    weights |= _existing(gate)
    if moe.shared is not None:
        weights |= gated_weights(f"{block}.shared_experts", moe.shared.gate_up, moe.shared.down)
    for index, expert in enumerate(config.experts):
        weights |= gated_weights(f"{block}.experts.{expert}", moe.gate_up.one(index), moe.down.one(index))
    return weights


def is_norm(name: str) -> bool:
    """Whether norm_offset is added to the tensor."""
    return NORM.search(name) is not None and not is_factor(name)


def is_factor(name: str) -> bool:
    """Whether the tensor only multiplies, and nothing is added to it."""
    return name.endswith(FACTORS)


def _norm_weights(config: ModelConfig, norms: LayerNorms, prefix: str) -> dict[str, Tensor]:
    if config.single_blocks is not None:
        return {f"{prefix}.norm.weight": norms.before_attention}
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
    return weights | parameters.o.named(f"{prefix}.o_proj") | split_weights(prefix, parameters.qkv, parts)


def _latent_weights(latent: LatentConfig, parameters: LatentParameters, prefix: str) -> dict[str, Tensor]:
    entry_rows = latent.rank + latent.rotated
    q_rows = parameters.down.rows - entry_rows
    weights = _existing({f"{prefix}.q_a_layernorm.weight": parameters.q_norm})
    if parameters.q_up is not None:
        weights |= parameters.q_up.named(f"{prefix}.q_b_proj")
    weights[f"{prefix}.kv_a_layernorm.weight"] = parameters.latent_norm
    weights |= parameters.up.named(f"{prefix}.kv_b_proj")
    parts = (("q_proj" if latent.q_rank is None else "q_a_proj", q_rows), ("kv_a_proj_with_mqa", entry_rows))
    weights |= parameters.o.named(f"{prefix}.o_proj") | split_weights(prefix, parameters.down, parts)
    weights.pop(f"{prefix}.q_proj.bias", None)  # q's only map has none
    return weights if parameters.index is None else weights | _index_weights(parameters.index, f"{prefix}.indexer")


def _index_weights(parameters: IndexParameters, prefix: str) -> dict[str, Tensor]:
    norm = parameters.key_norm
    return {
        **parameters.q_up.named(f"{prefix}.wq_b"),
        **parameters.key.named(f"{prefix}.wk"),
        **_existing({f"{prefix}.k_norm.weight": norm.weight, f"{prefix}.k_norm.bias": norm.bias}),
        **parameters.weights.named(f"{prefix}.weights_proj"),
    }


def _gated_weights(config: ModelConfig, gated: GatedParameters, prefix: str) -> dict[str, Tensor]:
    rows = gated.down.columns
    parts = (("gate_proj", rows), ("up_proj", rows))[-config.up_parts :]
    if config.fused_names:
        parts = (("gate_up_proj", 2 * rows),)
    return gated.down.named(f"{prefix}.down_proj") | split_weights(prefix, gated.gate_up, parts)


def _moe_weights(
    config: ModelConfig, moe: MoeConfig, parameters: MoeParameters, prefix: str, joined: bool
) -> dict[str, Tensor]:
    """joined: one tensor for all experts of a layer."""
    names = moe.names
    block = f"{prefix}.mlp" if joined and names.projections is not None else f"{prefix}.{names.block}".rstrip(".")
    router, experts = f"{block}.{names.router}", f"{block}.experts"
    weights = parameters.router.named(router)
    weights |= _existing({f"{router}.e_score_correction_bias": parameters.correction})
    if parameters.shared is not None:
        weights |= _gated_weights(config, parameters.shared, f"{block}.{names.shared}")
    if parameters.shared_gate is not None:
        weights |= parameters.shared_gate.named(f"{block}.{names.shared_gate}")
    if parameters.into_latent is not None and parameters.from_latent is not None:
        weights |= parameters.into_latent.named(f"{block}.fc1_latent_proj")
        weights |= parameters.from_latent.named(f"{block}.fc2_latent_proj")
    if names.projections is None or joined:
        for name, stack in (("gate_up_proj", parameters.gate_up), ("down_proj", parameters.down)):
            for kind, tensor in stack.tensors().items():
                stored = tensor.transpose(1, 2) if names.transposed and kind == "weight" else tensor
                weights[f"{experts}.{name}" + ("" if kind == "weight" else f"_{kind}")] = stored
        return weights
    *first, down = names.projections
    parts = tuple((name, moe.intermediate_size) for name in first)
    for index, expert in enumerate(config.experts):
        weights |= split_weights(f"{experts}.{expert}", parameters.gate_up.one(index), parts)
        weights |= parameters.down.one(index).named(f"{experts}.{expert}.{down}")
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
    weights |= layer.per_layer.gate.named(f"{prefix}.per_layer_input_gate")
    return weights | layer.per_layer.projection.named(f"{prefix}.per_layer_projection")


def _cross_weights(cross: CrossParameters, prefix: str) -> dict[str, Tensor]:
    attention, rows = f"{prefix}.cross_attn", cross.kv.rows // 2
    return {
        f"{prefix}.pre_cross_attn_layernorm.weight": cross.before,
        f"{prefix}.post_cross_attn_layernorm.weight": cross.behind,
        **cross.q.named(f"{attention}.q_proj"),
        **cross.o.named(f"{attention}.o_proj"),
        **split_weights(attention, cross.kv, (("k_proj", rows), ("v_proj", rows))),
    }


def _existing(weights: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if tensor is not None}
