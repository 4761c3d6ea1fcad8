"""Mistral: Llama without biases; the first releases slide a window of 4096 in every layer."""

from tandem.workers.models.config import ModelConfig, read_dense_config, read_window
from tandem.workers.models.fields import Fields


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    return read_dense_config(fields, architecture, window=read_window(fields))
