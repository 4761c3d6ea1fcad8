"""DeepSeek-V3: V2 with sigmoid scores, a learned correction of the choice, and groups ranked by their two best.

Layers for multi-token prediction, which follow the others in a checkpoint, are not read.
"""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families.deepseek_v2 import read_deepseek, read_group_limit, refuse_others
from tandem.workers.models.latent import read_latent
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.routing import Routing

SCALE, NUM_SHARED, NUM_DENSE = 2.5, 1, 3  # when absent, as in transformers


def read_config(fields: Fields) -> ModelConfig:
    refuse_others(fields, scoring_func="sigmoid", topk_method="noaux_tc")

    def route(moe: MoeConfig) -> Routing:
        return dataclasses.replace(
            moe.routing,
            sigmoid=True,
            groups=read_group_limit(fields, moe, counted=2),
            corrected=True,
            scale=fields.number("routed_scaling_factor", SCALE),
        )

    interleaved = fields.boolean("rope_interleave", True)
    latent = read_latent(fields, interleaved=interleaved, bias=fields.boolean("attention_bias", False))
    normalize = fields.boolean("norm_topk_prob", True)
    config = read_deepseek(fields, latent, route, normalize=normalize, num_shared=NUM_SHARED, num_dense=NUM_DENSE)
    return dataclasses.replace(config, num_extra_layers=fields.integer("num_nextn_predict_layers", 1))
