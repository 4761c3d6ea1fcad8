"""Qwen 2 and 2.5: q, k and v always carry a bias, o never."""

from tandem.workers.models.config import ModelConfig, read_dense_config, refuse_sliding_window
from tandem.workers.models.fields import Fields


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    if fields.boolean("use_sliding_window", False):
        refuse_sliding_window(fields)
    return read_dense_config(fields, architecture, qkv_bias=True)
