"""Gemma 2: norms around each block, softcaps, gelu, and a window in every other layer."""

import dataclasses
import math
from collections.abc import Callable

from tandem.cache.plan.rope import RopeParameters
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_size

HEAD_DIM, QUERY_SCALAR, ATTENTION_SOFTCAP, FINAL_SOFTCAP = 256, 256.0, 50.0, 30.0  # when absent, as in transformers


def read_config(fields: Fields) -> ModelConfig:
    return dataclasses.replace(
        read_gemma(fields, full_every=2),
        attn_softcap=fields.number_or_null("attn_logit_softcapping", ATTENTION_SOFTCAP),
        final_softcap=fields.number_or_null("final_logit_softcapping", FINAL_SOFTCAP),
    )


def read_gemma(
    fields: Fields,
    *,
    full_every: int,
    rope: Callable[[Fields, int], RopeParameters] = read_rope,
) -> ModelConfig:
    """What Gemma 2 and 3 share. full_every: of which number of layers the last has no window, if layer_types is absent.

    rope: see read_dense_config. A norm's weight is stored less 1, and multiplies in float32.
    """
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedFeature(
            f"{fields.source}: use_bidirectional_attention is true; only causal decoders are served"
        )
    bias = fields.boolean("attention_bias", False)
    config = read_dense_config(
        fields,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=Windows(read_size(fields), full_every=full_every),
        rope=rope,
    )
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        float32_norms=True,
        norm_offset=1.0,
        out_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
        attn_scale=fields.number("query_pre_attn_scalar", QUERY_SCALAR, positive=True) ** -0.5,
    )
