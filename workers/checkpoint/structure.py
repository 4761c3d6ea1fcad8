"""Lists the features of a model's layers by the fields of its config.json, whatever its architecture is called."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

SCALED = "scaled residuals"
# Fields of which one says so, unless it is null, false or 0.
FEATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "shared experts": (
            "n_shared_experts",
            "num_shared_experts",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        "groups of experts": ("n_group", "topk_group", "num_expert_group"),
        "latent attention": ("kv_lora_rank",),
        "attention by index keys": ("index_topk",),
        "linear attention": ("linear_num_value_heads", "linear_num_heads", "linear_attn_config"),
        "Mamba layers": ("mamba_num_heads", "mamba_n_heads", "mamba_d_state", "ssm_state_size", "state_size"),
        "sliding windows": ("sliding_window",),
        "attention in chunks": ("attention_chunk_size",),
        "softcaps": ("attn_logit_softcapping", "final_logit_softcapping"),
        "inputs of each layer": ("hidden_size_per_layer_input",),
        "an encoder": ("encoder", "encoder_layers", "num_encoder_layers"),
        "LayerNorm": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "ALiBi": ("alibi", "use_alibi"),
        "learned positions": ("n_positions", "max_target_positions"),
        "parallel blocks": ("parallel_attn", "use_parallel_residual"),
        SCALED: ("residual_multiplier", "scale_depth", "logit_scale", "logits_scaling"),
    }
)


def structure(values: Mapping[str, Any]) -> frozenset[str]:
    """Returns keys of FEATURES. values: the fields of config.json; its parts' fields count, too."""
    given = {name for part in _parts(values) for name, value in part.items() if value}
    given -= {name for name in FEATURES[SCALED] if values.get(name) == 1}
    if values.get("use_sliding_window") is False:
        given.discard("sliding_window")
    return frozenset(name for name, fields in FEATURES.items() if not given.isdisjoint(fields))


def _parts(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield values
    for name in ("text_config", "encoder", "decoder"):
        part = values.get(name)
        if isinstance(part, dict):
            yield part
