"""Where each tensor of a checkpoint goes: Hugging Face's names and the views of the parameters that they fill."""

from collections.abc import Collection

from torch import Tensor

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.parameters import DecoderParameters, GatedParameters, LayerParameters, MoeParameters

Parts = tuple[tuple[str, int], ...]
"""Names and numbers of rows of the tensors that one fused tensor takes."""


def checkpoint_places(
    config: ModelConfig, parameters: DecoderParameters, stored: Collection[str] = ()
) -> dict[str, Tensor]:
    """Hugging Face's tensor names and, for each, the contiguous view of `parameters` that it fills.

    stored: the names that the checkpoint has; they decide where there is more than one layout of a family.
    """
    places = {"model.embed_tokens.weight": parameters.embedding, "model.norm.weight": parameters.final_norm}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = parameters.lm_head
    joined = any(name.endswith(".experts.gate_up_proj") for name in stored)
    for index, layer in enumerate(parameters.layers):
        prefix = f"model.layers.{index}"
        places.update(_attention_places(config, layer, prefix))
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, GatedParameters):
            places.update(_gated_places(config, feed_forward, f"{prefix}.mlp"))
        else:
            assert config.moe is not None  # else the layer had no experts
            places.update(_moe_places(config.moe, feed_forward, prefix, joined))
    return places


def _attention_places(config: ModelConfig, layer: LayerParameters, prefix: str) -> dict[str, Tensor]:
    attention = f"{prefix}.self_attn"
    post_norm = "pre_feedforward_layernorm" if config.out_norms else "post_attention_layernorm"
    places = _existing(
        {
            f"{prefix}.input_layernorm.weight": layer.input_norm,
            f"{prefix}.post_attention_layernorm.weight": layer.attention_out_norm,
            f"{prefix}.{post_norm}.weight": layer.post_norm,
            f"{prefix}.post_feedforward_layernorm.weight": layer.feed_forward_out_norm,
            f"{attention}.q_norm.weight": layer.q_norm,
            f"{attention}.k_norm.weight": layer.k_norm,
            f"{attention}.sinks": layer.sinks,
            f"{attention}.o_proj.weight": layer.o,
            f"{attention}.o_proj.bias": layer.o_bias,
        }
    )
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    separate = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    parts = (("qkv_proj", q_rows + 2 * kv_rows),) if config.fused_names else separate
    return (
        places
        | _split_rows(attention, "weight", layer.qkv, parts)
        | _split_rows(attention, "bias", layer.qkv_bias, parts)
    )


def _gated_places(config: ModelConfig, gated: GatedParameters, prefix: str) -> dict[str, Tensor]:
    rows = config.intermediate_size
    parts = (("gate_up_proj", 2 * rows),) if config.fused_names else (("gate_proj", rows), ("up_proj", rows))
    places = _existing({f"{prefix}.down_proj.weight": gated.down, f"{prefix}.down_proj.bias": gated.down_bias})
    return (
        places
        | _split_rows(prefix, "weight", gated.gate_up, parts)
        | _split_rows(prefix, "bias", gated.gate_up_bias, parts)
    )


def _moe_places(moe: MoeConfig, parameters: MoeParameters, prefix: str, joined: bool) -> dict[str, Tensor]:
    """joined: one tensor for all experts of a layer."""
    names = moe.names
    block = f"{prefix}.mlp" if joined or names.projections is None else f"{prefix}.{names.block}"
    router, experts = f"{block}.{names.router}", f"{block}.experts"
    places = {f"{router}.weight": parameters.router}
    if names.projections is None or joined:
        weights = {f"{experts}.gate_up_proj": parameters.gate_up, f"{experts}.down_proj": parameters.down}
        places |= {name: weight.transpose(1, 2) if names.transposed else weight for name, weight in weights.items()}
        return places | _existing(
            {
                f"{router}.bias": parameters.router_bias,
                f"{experts}.gate_up_proj_bias": parameters.gate_up_bias,
                f"{experts}.down_proj_bias": parameters.down_bias,
            }
        )
    gate, up, down = names.projections
    parts = ((gate, moe.intermediate_size), (up, moe.intermediate_size))
    for expert in range(moe.num_experts):
        places |= _split_rows(f"{experts}.{expert}", "weight", parameters.gate_up[expert], parts)
        places[f"{experts}.{expert}.{down}.weight"] = parameters.down[expert]
    return places


def _existing(places: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in places.items() if tensor is not None}


def _split_rows(prefix: str, kind: str, fused: Tensor | None, parts: Parts) -> dict[str, Tensor]:
    if fused is None:
        return {}
    rows = fused.split([count for _, count in parts])
    return {f"{prefix}.{name}.{kind}": part for (name, _), part in zip(parts, rows, strict=True)}
