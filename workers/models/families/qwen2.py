"""Qwen 2 and 2.5: q, k and v always carry a bias, o never; later layers may have a window."""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.window_fields import read_late_windows


def read_config(fields: Fields) -> ModelConfig:
    return dataclasses.replace(
        read_dense_config(fields, windows=read_late_windows(fields)),
        qkv_bias=True,
    )
