"""Mistral: Llama without biases; the first releases slide a window of 4096 in every layer."""

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.window_fields import Windows, read_size


def read_config(fields: Fields) -> ModelConfig:
    return read_dense_config(fields, windows=Windows(read_size(fields)))
