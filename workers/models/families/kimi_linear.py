"""Kimi Linear: Kimi Delta Attention in three of four layers, and latent attention without RoPE in the others. After a
first dense layer there are shared and routed experts, chosen as DeepSeek-V3's.
"""

import dataclasses

from tandem.cache.kernels.recurrent import KdaShape
from tandem.cache.plan.rope import RopeParameters
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families.deepseek import read_v3, refuse_others
from tandem.workers.models.latent import read_latent
from tandem.workers.models.moe import ExpertNames
from tandem.workers.models.recurrent.fields import FULL, LINEAR, MAX_SIZE, KdaConfig

NAMES = ExpertNames(block="block_sparse_moe", router="gate", projections=("w1", "w3", "w2"))
USUAL = {  # names that other families have for fields of this one
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
DENSE = (r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1.")  # transformers saves dense layers so
MODULES = (  # transformers' modules, by whose names PEFT saves adapters
    (r"\.self_attn\.forget_gate\.", ".self_attn."),
    (r"\.mlp\.shared_experts\.", ".block_sparse_moe.shared_experts."),
)
PUBLISHED = {LINEAR: "kda_layers", FULL: "full_attn_layers"}  # of linear_attn_config, where the first layer is 1


def read_kimi_linear(fields: Fields) -> ModelConfig:
    refuse_others(fields, hidden_act="silu", moe_router_activation_func="sigmoid", mla_use_nope=True)
    usual = _with_usual_names(fields)
    latent = read_latent(usual, interleaved=False)
    config = read_v3(usual, latent, num_dense=1, groups=(1, 1), kinds="mlp_layer_types", scale=2.446)
    assert config.moe is not None  # read_v3 reads experts
    return dataclasses.replace(
        config,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope=RopeParameters("none", 0),
        recurrent=_read_delta_attention(fields, config.num_layers),
        moe=dataclasses.replace(config.moe, names=NAMES) if config.moe.layers else None,
        weight_renames=(DENSE, *MODULES),
    )


def _with_usual_names(fields: Fields) -> Fields:
    values = {name: fields.raw(name) for name in fields.names()}
    values |= {usual: values[own] for usual, own in USUAL.items() if own in values}
    absent = {"q_lora_rank": None, "num_nextn_predict_layers": 0}
    return Fields({**absent, **values, "layer_types": None}, fields.source)


def _read_delta_attention(fields: Fields, num_layers: int) -> KdaConfig:
    published = fields.section("linear_attn_config")
    refuse_others(published, gate_lower_bound=None, use_full_rank_gate=False)
    heads = published.integer("num_heads", fields.integer("linear_num_heads", 32, 1, MAX_SIZE), 1, MAX_SIZE)
    size = published.integer("head_dim", fields.integer("linear_head_dim", 128, 1, MAX_SIZE), 1, MAX_SIZE)
    taps = fields.integer("linear_conv_kernel_dim", 4, 2, MAX_SIZE)
    taps = published.integer("short_conv_kernel_size", taps, 2, MAX_SIZE)
    shape = KdaShape(key_heads=heads, value_heads=heads, key_dim=size, value_dim=size, tail=taps - 1)
    layers = _read_layers(fields, published, num_layers)
    if len(layers) == num_layers:
        raise UnsupportedFeature(
            f"{fields.source}: all {num_layers} layers keep recurrent states; at least one of {FULL} is served"
        )
    return KdaConfig(layers, shape, "self_attn")


def _read_layers(fields: Fields, published: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers that keep states."""
    kinds = fields.raw("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in PUBLISHED for kind in kinds):
            raise fields.invalid("layer_types", f"{LINEAR} or {FULL} for each of {num_layers} layers")
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
    if any(name not in published for name in PUBLISHED.values()):
        return frozenset(layer for layer in range(num_layers) if layer == 0 or layer % 4)
    states, others = (published.integers(PUBLISHED[kind], "layer") for kind in (LINEAR, FULL))
    if sorted(states + others) != list(range(1, num_layers + 1)):
        raise published.invalid(PUBLISHED[LINEAR], f"the layers of 1 to {num_layers} that full_attn_layers lacks")
    return frozenset(layer - 1 for layer in states)
