"""Mistral: Llama without biases; the first releases slide a window of 4096."""

from tandem.workers.models.config import ModelConfig, read_dense_config, refuse_sliding_window
from tandem.workers.models.fields import Fields


def read_config(fields: Fields, architecture: str) -> ModelConfig:
    refuse_sliding_window(fields)
    return read_dense_config(fields, architecture)
