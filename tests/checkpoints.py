"""Tiny random checkpoints of every family and config feature, made by transformers, which is also their oracle."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that greedy generation runs to its length
    "pad_token_id": 0,
}
THETA = {"rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", **THETA}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **THETA}}),
    # Short, so that the tests' sequences grow beyond it and the frequencies change.
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, **THETA}, "max_position_embeddings": 40},
    ),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, **THETA}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, **THETA}}),
    "llama-yarn-options": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                **THETA,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN, **THETA, "attention_factor": 1.3}}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


def make_model(case: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The transformers model of a case in float32, every parameter random: biases and norm weights matter too.

    changes: fields of its configuration.
    """
    family, fields = CASES[case]
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**{**COMMON, **fields, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1, 0.3, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def save_checkpoint(case: str, folder: Path, **save_options: Any) -> Path:
    """Writes the case's checkpoint into `folder` with save_pretrained and returns the folder."""
    make_model(case).save_pretrained(folder, **save_options)
    return folder
