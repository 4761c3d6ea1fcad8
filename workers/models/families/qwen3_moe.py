"""Qwen 3 with experts: its dense attention, and experts in every layer that mlp_only_layers and the step leave them."""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import ExpertNames, read_moe
from tandem.workers.models.window_fields import Windows, read_size

NAMES = ExpertNames(block="mlp", router="gate", projections=("gate_proj", "up_proj", "down_proj"))


def read_config(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    window = read_size(fields) if fields.boolean("use_sliding_window", False) else None  # of all layers
    config = read_dense_config(fields, windows=Windows(window, typed=False))
    step = fields.integer("decoder_sparse_step", 1, minimum=1)
    dense = fields.integers("mlp_only_layers", "layer index")
    moe = read_moe(
        fields,
        NAMES,
        normalize=fields.boolean("norm_topk_prob", False),
        layers=frozenset(layer for layer in range(step - 1, config.num_layers, step) if layer not in dense),
        intermediate_size="moe_intermediate_size",
    )
    return dataclasses.replace(config, qkv_bias=bias, o_bias=bias, qk_norm=True, moe=moe)
