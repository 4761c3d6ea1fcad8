"""Seed-OSS: Llama whose q, k and v carry a bias unless the config says otherwise; o has a switch of its own."""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config

HEAD_DIM = 128  # when absent, as in transformers


def read_seed_oss(fields: Fields) -> ModelConfig:
    config = read_dense_config(fields, head_dim=HEAD_DIM, attention_bias=True, layer_types=False)
    return dataclasses.replace(
        config,
        o_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
