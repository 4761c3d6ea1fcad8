"""Qwen 3, dense: q and k are normalised per head; head_dim stands apart from hidden_size / num_attention_heads."""

from tandem.workers.models.config import ModelConfig, read_dense_config, read_window
from tandem.workers.models.fields import Fields
from tandem.workers.models.qwen2 import FIRST_WINDOW_LAYER

HEAD_DIM = 128  # of a config that does not give it, as in transformers


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return read_dense_config(
        fields,
        architecture,
        head_dim=HEAD_DIM,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        window=read_window(fields) if fields.boolean("use_sliding_window", False) else None,
        first_window_layer=fields.integer("max_window_layers", FIRST_WINDOW_LAYER),
    )
