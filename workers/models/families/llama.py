"""Llama 1 to 3: attention_bias covers q, k, v and o; mlp_bias the feed-forward."""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config


def read_llama(fields: Fields) -> ModelConfig:
    num_heads = fields.integer("num_attention_heads", minimum=1)  # Llama 1 has no grouped queries
    config = read_dense_config(fields, num_kv_heads=num_heads, attention_bias=False)
    return dataclasses.replace(config, mlp_bias=fields.boolean("mlp_bias", False))
