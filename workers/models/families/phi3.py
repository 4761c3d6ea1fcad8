"""Phi 3, 3.5 and 4: Llama with q, k, v and gate, up stored as one tensor each; may rotate only a part of each head."""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_optional_size

READ_ROPE = partial(read_rope, partial_rotary=True, original_length=4096)  # as in transformers
EPS = 1e-5  # when absent, as in transformers


def read_phi3(fields: Fields) -> ModelConfig:
    num_heads = fields.integer("num_attention_heads", minimum=1)
    window = read_optional_size(fields)
    if window is not None and window >= fields.integer("max_position_embeddings", minimum=1):
        window = None  # that of the models for long contexts: no sequence grows beyond it
    windows = Windows(window, typed=False)
    config = read_dense_config(fields, num_kv_heads=num_heads, rms_norm_eps=EPS, rope=READ_ROPE, windows=windows)
    return dataclasses.replace(config, fused_names=True)
