"""gpt_oss: experts with biases and a clamped swiglu, learned attention sinks, and a window in every other layer."""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.activation import ClampedSwiglu
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import ExpertNames, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_size

NAMES = ExpertNames(block="mlp", router="router", projections=None, transposed=True)
HEAD_DIM, WINDOW, THETA, EPS, ALPHA, LIMIT = 64, 128, 150_000.0, 1e-5, 1.702, 7.0  # when absent, as in transformers


def read_gpt_oss(fields: Fields) -> ModelConfig:
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        raise InvalidConfig(f"{fields.source}: rope_scaling is missing; it must be an object, for gpt_oss needs yarn's")
    config = read_dense_config(
        fields,
        head_dim=HEAD_DIM,
        attention_bias=True,
        rms_norm_eps=EPS,
        windows=Windows(read_size(fields, WINDOW), full_every=2),
        rope=partial(read_rope, default_theta=THETA),
    )
    return dataclasses.replace(
        config,
        activation=ClampedSwiglu(fields.number("swiglu_alpha", ALPHA), fields.number("swiglu_limit", LIMIT)),
        moe=read_moe(fields, NAMES, normalize=True, bias=True),
        float32_norms=True,
        attention_sinks=True,
    )
