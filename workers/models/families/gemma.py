"""Gemma 2: norms around each block, softcaps, gelu, and a window in every other layer.

Gemma 3, text: normalised q and k in place of their softcap; a window in five of six layers, which have their own RoPE.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

from tandem.cache.plan.rope import RopeParameters
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_size

HEAD_DIM, QUERY_SCALAR, ATTENTION_SOFTCAP, FINAL_SOFTCAP = 256, 256.0, 50.0, 30.0  # when absent, as in transformers
FULL_EVERY = 6  # of Gemma 3


def read_gemma2(fields: Fields) -> ModelConfig:
    return dataclasses.replace(
        _read_both(fields, full_every=2),
        attn_softcap=fields.number_or_null("attn_logit_softcapping", ATTENTION_SOFTCAP),
        final_softcap=fields.number_or_null("final_logit_softcapping", FINAL_SOFTCAP),
    )


def read_gemma3(fields: Fields) -> ModelConfig:
    softcap = fields.raw("attn_logit_softcapping")
    if softcap is not None:
        raise UnsupportedFeature(
            f"{fields.source}: attn_logit_softcapping is {softcap!r}; it must be null (transformers ignores it)"
        )
    config = _read_both(
        fields,
        full_every=fields.integer("sliding_window_pattern", FULL_EVERY, minimum=1),
        rope=partial(read_rope, layer_type="full_attention", default_theta=1e6),
    )
    return dataclasses.replace(
        config,
        counts_stretch=True,
        qk_norm=True,
        local_rope=read_rope(
            fields, config.head_dim, layer_type="sliding_attention", theta_field="rope_local_base_freq"
        ),
        final_softcap=fields.number_or_null("final_logit_softcapping", None),
    )


def _read_both(
    fields: Fields, *, full_every: int, rope: Callable[[Fields, int], RopeParameters] = read_rope
) -> ModelConfig:
    """full_every: the last of so many layers has no window, if layer_types is absent. rope: see
    read_dense_config. A norm's weight is stored less 1, and multiplies in float32."""
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedFeature(
            f"{fields.source}: use_bidirectional_attention is true; only causal decoders are served"
        )
    config = read_dense_config(
        fields,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        attention_bias=False,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=Windows(read_size(fields), full_every=full_every),
        rope=rope,
    )
    return dataclasses.replace(
        config,
        float32_norms=True,
        norm_offset=1.0,
        out_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
        attn_scale=fields.number("query_pre_attn_scalar", QUERY_SCALAR, positive=True) ** -0.5,
    )
