"""Qwen 2 and 2.5: q, k and v always carry a bias, o never; later layers may have a window.

Qwen 3: q and k are normalised per head; head_dim stands apart from hidden_size / num_attention_heads. With experts:
these are in every layer that mlp_only_layers and the step leave them.
"""

import dataclasses

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import GATED_NAMES, read_moe
from tandem.workers.models.window_fields import Windows, read_late_windows, read_size

HEAD_DIM = 128  # of a dense Qwen 3 whose config does not give it, as in transformers


def read_qwen2(fields: Fields) -> ModelConfig:
    return dataclasses.replace(read_dense_config(fields, windows=read_late_windows(fields)), qkv_bias=True)


def read_qwen3(fields: Fields) -> ModelConfig:
    windows = read_late_windows(fields)
    config = read_dense_config(fields, head_dim=HEAD_DIM, attention_bias=False, windows=windows)
    return dataclasses.replace(config, qk_norm=True)


def read_qwen3_moe(fields: Fields) -> ModelConfig:
    window = read_size(fields) if fields.boolean("use_sliding_window", False) else None  # of all layers
    config = read_dense_config(fields, attention_bias=False, windows=Windows(window, typed=False))
    step = fields.integer("decoder_sparse_step", 1, minimum=1)
    dense = fields.integers("mlp_only_layers", "layer index")
    moe = read_moe(
        fields,
        GATED_NAMES,
        normalize=fields.boolean("norm_topk_prob", False),
        layers=frozenset(layer for layer in range(step - 1, config.num_layers, step) if layer not in dense),
        intermediate_size="moe_intermediate_size",
    )
    return dataclasses.replace(config, qk_norm=True, moe=moe)
