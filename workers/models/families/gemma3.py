"""Gemma 3, text: Gemma 2 with normalised q and k, a window in five of six layers and a RoPE of their own for those."""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.families.gemma2 import read_gemma
from tandem.workers.models.rope_fields import read_rope

FULL_EVERY = 6


def read_config(fields: Fields) -> ModelConfig:
    softcap = fields.raw("attn_logit_softcapping")
    if softcap is not None:
        raise UnsupportedFeature(
            f"{fields.source}: attn_logit_softcapping is {softcap!r}; it must be null (transformers ignores it)"
        )
    config = read_gemma(
        fields,
        full_every=fields.integer("sliding_window_pattern", FULL_EVERY, minimum=1),
        rope=partial(read_rope, layer_type="full_attention", default_theta=1e6),
    )
    return dataclasses.replace(
        config,
        qk_norm=True,
        local_rope=read_rope(
            fields, config.head_dim, layer_type="sliding_attention", theta_field="rope_local_base_freq"
        ),
        final_softcap=fields.number_or_null("final_logit_softcapping", None),
    )
