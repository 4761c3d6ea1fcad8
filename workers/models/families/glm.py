"""GLM-4-MoE (GLM-4.5 to 4.7): grouped-query attention that rotates a part of each head. After a few dense layers there
are shared and routed experts, chosen as DeepSeek-V3's. Its layer for multi-token prediction is read where it drafts.
"""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import MAX_LAYERS, ModelConfig, read_dense_config
from tandem.workers.models.families.deepseek import read_group_limit, refuse_others
from tandem.workers.models.moe import GATED_NAMES, read_moe
from tandem.workers.models.rope_fields import read_rope

ROTATED = 0.5  # of a head, when partial_rotary_factor is absent


def read_glm4_moe(fields: Fields) -> ModelConfig:
    refuse_others(fields, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config = read_dense_config(
        fields,
        num_kv_heads=8,
        attention_bias=False,
        rms_norm_eps=1e-5,
        rope=partial(read_rope, partial_rotary=True, default_fraction=ROTATED),
        layer_types=False,
    )
    first = fields.integer("first_k_dense_replace", 1)
    moe = read_moe(
        fields,
        GATED_NAMES,
        normalize=fields.boolean("norm_topk_prob", True),
        layers=frozenset(range(first, config.num_layers)),
        intermediate_size="moe_intermediate_size",
        count="n_routed_experts",
    )
    groups, scale = read_group_limit(fields, moe, 2, (1, 1)), fields.number("routed_scaling_factor", 1.0)
    routing = dataclasses.replace(moe.routing, scores="sigmoid", groups=groups, corrected=True, scale=scale)
    shared_size = moe.intermediate_size * fields.integer("n_shared_experts", 1, minimum=1)
    moe = dataclasses.replace(moe, routing=routing, shared_size=shared_size, float32_router=True)
    return dataclasses.replace(
        config,
        o_bias=False,
        qk_norm=fields.boolean("use_qk_norm", False),
        moe=moe,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 1, maximum=MAX_LAYERS),
    )
