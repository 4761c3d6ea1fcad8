"""Qwen 3, dense: q and k are normalised per head; head_dim stands apart from hidden_size / num_attention_heads."""

from tandem.workers.models.config import ModelConfig, read_dense_config, refuse_sliding_window
from tandem.workers.models.fields import Fields

HEAD_DIM = 128  # of a config that does not give it, as in transformers


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    if fields.boolean("use_sliding_window", False):
        refuse_sliding_window(fields)
    bias = fields.boolean("attention_bias", False)
    return read_dense_config(fields, architecture, head_dim=HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True)
