"""Nemotron-H and Nemotron Nano: a layer is one block, which is Mamba-2, attention without RoPE, or a feed-forward with
squared ReLU. That is dense, or shared and routed experts, which are chosen as DeepSeek-V3's (Nemotron 3). The routed
experts may stand between two maps to and from fewer numbers (Nemotron 3 Super).

Steps of time are not limited, as in the published code. transformers raises prompts' steps to time_step_min, but not
single tokens': with trained weights the two may differ there. Layers for multi-token prediction are not read.
"""

import dataclasses
from math import inf

from tandem.cache.kernels.recurrent import SsdShape
from tandem.cache.plan.rope import RopeParameters
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.models.config import MAX_LAYERS, ModelConfig, read_dense_config
from tandem.workers.models.families.deepseek import read_group_limit, refuse_others
from tandem.workers.models.moe import ExpertNames, MoeConfig, read_moe
from tandem.workers.models.recurrent.fields import MAX_SIZE, Mamba2Config

MIXER = "mixer"  # the submodule of each layer
NAMES = ExpertNames(block=MIXER, router="gate", projections=("up_proj", "down_proj"))
RECURS, ATTENDS, DENSE, EXPERTS = BLOCKS = "M*-E"
OF_NAMES = {
    "linear_attention": RECURS,
    "mamba": RECURS,
    "full_attention": ATTENDS,
    "attention": ATTENDS,
    "mlp": DENSE,
    "moe": EXPERTS,
}
NO_LIMITS = ([0.0, inf], [0.0, {"__float__": "Infinity"}])  # of time steps, as JSON has infinity
# When absent, as in transformers.
HEAD_DIM, SHARED_SIZE = 128, 7688


def read_nemotron_h(fields: Fields) -> ModelConfig:
    refuse_others(fields, mamba_hidden_act="silu", attention_bias=False)
    if "time_step_limit" in fields and fields.raw("time_step_limit") not in NO_LIMITS:
        limit = SHOWN.repr(fields.raw("time_step_limit"))
        raise UnsupportedFeature(f"{fields.source}: time_step_limit is {limit}; only 0 and infinity are served")
    blocks = _read_blocks(fields)
    config = read_dense_config(
        _with_usual_names(fields, len(blocks)),
        num_kv_heads=8,
        head_dim=fields.integer("attention_head_dim", HEAD_DIM, minimum=2),
        rope=lambda *_: RopeParameters("none", 0),
        activation=("mlp_hidden_act", "relu2"),
        layer_types=False,
    )
    return dataclasses.replace(
        config,
        recurrent=_read_mamba2(fields, _layers(blocks, RECURS)) if RECURS in blocks else None,
        moe=_read_experts(fields, _layers(blocks, EXPERTS)) if EXPERTS in blocks else None,
        single_blocks=_layers(blocks, DENSE, EXPERTS),
        mlp_bias=fields.boolean("mlp_bias", False),
        float32_norms=True,
        attention_block=MIXER,
        feed_forward_block=MIXER,
        end_names=("embeddings", "norm_f"),
        weight_prefix=("backbone.", "model."),
        skipped_weights=("mtp.",),
    )


def _read_blocks(fields: Fields) -> str:
    """Returns a letter of BLOCKS for each layer."""
    names, pattern = fields.raw("layers_block_type"), fields.raw("hybrid_override_pattern")
    if names is None and isinstance(pattern, str):
        blocks, field = pattern, "hybrid_override_pattern"
    elif isinstance(names, list) and all(isinstance(name, str) for name in names):
        blocks, field = "".join(OF_NAMES.get(name, "?") for name in names), "layers_block_type"
    else:
        raise fields.invalid("layers_block_type", f"a list of {', '.join(OF_NAMES)}")
    if not 0 < len(blocks) <= MAX_LAYERS or set(blocks) - set(BLOCKS):
        accepted = ", ".join(OF_NAMES if field == "layers_block_type" else BLOCKS)
        raise fields.invalid(field, f"one of {accepted} for each of 1 to {MAX_LAYERS} layers")
    if ATTENDS not in blocks:
        raise UnsupportedFeature(f"{fields.source}: {field} has no attention; at least one layer with it is served")
    return blocks


def _layers(blocks: str, *kinds: str) -> frozenset[int]:
    return frozenset(layer for layer, block in enumerate(blocks) if block in kinds)


def _with_usual_names(fields: Fields, num_layers: int) -> Fields:
    """Adds the fields under the names that other families use."""
    values = {name: fields.raw(name) for name in fields.names()}
    values |= {"num_hidden_layers": num_layers, "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5)}
    return Fields({"intermediate_size": 21504, **values}, fields.source)


def _read_mamba2(fields: Fields, layers: frozenset[int]) -> Mamba2Config:
    shape = SsdShape(
        num_heads=fields.integer("mamba_num_heads", 128, 1, MAX_SIZE),
        groups=fields.integer("n_groups", 8, 1, MAX_SIZE),
        head_dim=fields.integer("mamba_head_dim", 64, 1, MAX_SIZE),
        state_size=fields.integer("ssm_state_size", 128, 1, MAX_SIZE),
        tail=fields.integer("conv_kernel", 4, 2, MAX_SIZE) - 1,
    )
    if shape.num_heads % shape.groups:
        raise fields.invalid("mamba_num_heads", f"a multiple of n_groups, {shape.groups}")
    return Mamba2Config(
        layers=layers,
        shape=shape,
        block=MIXER,
        biased=fields.boolean("use_bias", False),
        conv_biased=fields.boolean("use_conv_bias", True),
    )


def _read_experts(fields: Fields, layers: frozenset[int]) -> MoeConfig:
    moe = read_moe(
        fields,
        NAMES,
        normalize=fields.boolean("norm_topk_prob", True),
        layers=layers,
        intermediate_size="moe_intermediate_size",
        count="n_routed_experts",
    )
    groups, scale = read_group_limit(fields, moe, 2, (1, 1)), fields.number("routed_scaling_factor", 1.0)
    routing = dataclasses.replace(moe.routing, scores="sigmoid", groups=groups, corrected=True, scale=scale)
    return dataclasses.replace(
        moe,
        routing=routing,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", SHARED_SIZE, minimum=1),
        latent_size=fields.integer("moe_latent_size", minimum=1) if "moe_latent_size" in fields else None,
        float32_router=True,
    )
