"""Qwen 3, dense: q and k are normalised per head; head_dim stands apart from hidden_size / num_attention_heads."""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.window_fields import read_late_windows

HEAD_DIM = 128  # of a config that does not give it, as in transformers


def read_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    config = read_dense_config(fields, head_dim=HEAD_DIM, windows=read_late_windows(fields))
    return dataclasses.replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
