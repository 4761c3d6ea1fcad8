"""Qwen 2 and 2.5: q, k and v always carry a bias, o never; later layers may have a window."""

from tandem.workers.models.config import ModelConfig, read_dense_config, read_window
from tandem.workers.models.fields import Fields

FIRST_WINDOW_LAYER = 28  # of a config that does not give max_window_layers, as in transformers


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    return read_dense_config(
        fields,
        architecture,
        qkv_bias=True,
        window=read_window(fields) if fields.boolean("use_sliding_window", False) else None,
        first_window_layer=fields.integer("max_window_layers", FIRST_WINDOW_LAYER),
    )
