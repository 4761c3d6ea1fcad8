"""Mistral: Llama without biases; the first releases slide a window of 4096 in every layer. Mixtral has experts."""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import ExpertNames, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_optional_size, read_size

NAMES = ExpertNames(block="block_sparse_moe", router="gate", projections=("w1", "w3", "w2"))
READ_ROPE, EPS = partial(read_rope, default_theta=1e6), 1e-5  # what Mixtral's config does not give, as in transformers


def read_mistral(fields: Fields) -> ModelConfig:
    return read_dense_config(fields, windows=Windows(read_size(fields)))


def read_mixtral(fields: Fields) -> ModelConfig:
    windows = Windows(read_optional_size(fields), typed=False)
    config = read_dense_config(fields, windows=windows, rope=READ_ROPE, rms_norm_eps=EPS)
    return dataclasses.replace(config, moe=read_moe(fields, NAMES, normalize=True))
