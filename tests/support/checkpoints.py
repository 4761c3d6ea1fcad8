"""Tiny random checkpoints of every family and config feature, made by transformers, which is also their oracle."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tandem.cluster.tools.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The names of transformers' configuration and model. Importing all of them takes seconds.
FAMILIES: dict[str, tuple[str, str]] = {
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
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
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
# Sizes of heads that no other size equals, so that none can stand in for another.
RECURRENT = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
QWEN3_NEXT = {**RECURRENT, **QWEN3_MOE, "shared_expert_intermediate_size": 24}
KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 6,
    "linear_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
NEMOTRON_H = {
    "hybrid_override_pattern": "ME*M-",
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
GEMMA3 = {"sliding_window": 24, "num_hidden_layers": 4, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}
GEMMA4 = {
    "sliding_window": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 210,
}
GPT_OSS = {
    "sliding_window": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, **THETA, "truncate": False},
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "intermediate_size": 40,
    "intermediate_size_mlp": 96,
    "num_local_experts": 5,
}
GROUPED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
DEEPSEEK = {
    **GROUPED,
    "num_key_value_heads": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "q_lora_rank": 48,
    "rms_norm_eps": 0.1,  # which the norms of latents do not take
}
# Eight index heads: with fewer all products of a position may be below 0, and the choice among equals is chance.
INDEXED = {
    **DEEPSEEK,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 24,
}
NOT_OF_A_CONFIG = ("architectures", "num_hash_layers", "intermediate_size")
V4 = {
    **{name: value for name, value in ARCHITECTURES["deepseek_v4"].items() if name not in NOT_OF_A_CONFIG},
    "o_lora_rank": 24,
    "sliding_window": 24,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"],
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,  # experts in 4 bits have scales of 32 numbers
    "index_topk": 6,
    "hc_mult": 3,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, **THETA},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_shared_experts": 2, "routed_scaling_factor": 4.0},
    ),
    "deepseek_v2-one-map": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**YARN, **THETA, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, **THETA, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {**INDEXED, "rope_parameters": {**YARN, **THETA, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm4_moe": ("glm4_moe", {**GROUPED, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True}),
    "glm4_moe-options": (
        "glm4_moe",
        {
            **GROUPED,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, **THETA},
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**DEEPSEEK, "num_key_value_heads": 4, "v_head_dim": 40}),
    # The second layer attends to what the first has chosen.
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {
            **INDEXED,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
    # Entries of 32 positions, so that the tests' sequences have some.
    "deepseek_v4": (
        "deepseek_v4",
        {**V4, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}},
    ),
    "deepseek_v4-128": ("deepseek_v4", {**V4, "max_position_embeddings": 512}),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR),
    "kimi_linear-options": (
        "kimi_linear",
        {
            **KIMI_LINEAR,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "rms_norm_eps": 0.1,
        },
    ),
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
                "beta_fast": 3.0,  # low enough that each of the options moves a frequency of so short a context
                "beta_slow": 0.5,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "llama4": ("llama4", {**LLAMA4, "rope_parameters": {**LLAMA3, **THETA}, "rms_norm_eps": 0.1}),
    "llama4-options": (
        "llama4",
        {
            **LLAMA4,
            "no_rope_layers": [0, 1, 1, 0],
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "attention_chunk_size": 16,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 24}),
    # Caps that cut deep, so that leaving them out shows.
    "gemma2-softcaps": (
        "gemma2",
        {"sliding_window": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "head_dim": 32},
    ),
    "gemma3": ("gemma3", {**GEMMA3, "final_logit_softcapping": 3.0}),
    "gemma3-linear": (
        "gemma3",
        {
            **GEMMA3,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    # Two readers of a window and one that sees all, the last, whatever layer_types says.
    "gemma4": (
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    ),
    "gemma4-experts": (
        "gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    # Feed-forwards that follow none and each other, and attention behind which there is none.
    "nemotron_h-options": (
        "nemotron_h",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "-*M--MEE*",
            "moe_latent_size": 32,  # a multiple of 8, or transformers fails in 16 bits
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "conv_kernel": 3,
            "layer_norm_epsilon": 0.1,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-head-dim": ("phi3", {"head_dim": 96}),
    # Between the tests' sequences: those that are longer have other factors.
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.9, 2.5, 3.0],
                "long_factor": [2.0, 3.0, 5.0, 9.0, 12.0, 14.0],
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 100,
                **THETA,
            },
            "original_max_position_embeddings": 100,
        },
    ),
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
    "qwen3_moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-sparse": (
        "qwen3_moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT),
    "qwen3_next-options": (
        "qwen3_next",
        {
            **QWEN3_NEXT,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, **THETA},
        },
    ),
    "qwen3_5": ("qwen3_5", RECURRENT),
    "qwen3_5-tied": ("qwen3_5", {**RECURRENT, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe", QWEN3_NEXT),
    "seed_oss": ("seed_oss", {}),
    "seed_oss-options": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
}


def sizes_for_ranks(case: str, ranks: int) -> dict[str, int]:
    """Returns fields of a case's configuration with which so many ranks can divide its recurrent heads. Four ranks
    divide eight heads. Cases have two heads that serve them, and two ranks share each."""
    fields = {"linear_num_heads", "linear_num_value_heads", "mamba_num_heads"} & CASES[case][1].keys()
    return dict.fromkeys(fields, 8) if ranks == 4 else {}


def make_model(case: str, seed: int = 0, **changes: Any) -> "PreTrainedModel":
    """The transformers model of a case in float32, every parameter random: biases and norm weights matter too.

    changes: fields of its configuration.
    """
    import transformers

    family, fields = CASES[case]
    config_class, model_class = (getattr(transformers, name) for name in FAMILIES[family])
    model = model_class(config_class(**{**COMMON, **fields, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "norm_f.weight", "scale")):
                parameter.normal_(1, 0.3, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
            if family in ADD_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.sub_(1)  # the model adds 1: as in Gemma, but recurrent layers magnify what is rounded
            if family == "gemma4" and name.endswith("q_norm.weight"):
                parameter.mul_(0.3)  # scores are not scaled: large ones would magnify what is rounded
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.5, generator=generator)
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(buffer.shape[0], model.config.n_routed_experts, generator=generator).topk(3)[1])
            if name.endswith("layer_scalar"):
                buffer.normal_(1, 0.3, generator=generator)
    return model


ADD_ONE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
KEEP_STATES = (*ADD_ONE, "kimi_linear", "nemotron_h")
"""Families with recurrent layers."""
CHOOSE_POSITIONS = ("deepseek_v32", "glm_moe_dsa")
"""Families whose tokens attend to positions that an index chooses."""


def sizes_on_gpu(family: str) -> dict[str, int]:
    """Returns changes with which the kernels for 16 bits on a GPU serve the model."""
    if family == "deepseek_v4":
        return {"head_dim": 64, "hidden_size": 256}
    if family == "kimi_linear":
        latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        return {**latents, "hidden_size": 256}
    if family.startswith("deepseek") or family in ("glm4_moe_lite", "glm_moe_dsa"):
        # transformers takes the width of RoPE from head_dim in V3, from qk_rope_head_dim in V2.
        rotated = {"qk_rope_head_dim": 64, "head_dim": 64}
        index = {"index_head_dim": 128, "index_n_heads": 64} if family in CHOOSE_POSITIONS else {}
        key, value = (192, 256) if family.startswith("glm") else (128, 128)
        return {"kv_lora_rank": 512, **rotated, "qk_nope_head_dim": key, "v_head_dim": value, **index}
    wide = {"global_head_dim": 512} if family == "gemma4" else {}  # as published
    return {"head_dim": 96 if family == "phi3-head-dim" else 64, "hidden_size": 256, **wide}


def save_checkpoint(case: str, folder: Path, **save_options: Any) -> Path:
    """Writes the case's checkpoint into `folder` with save_pretrained and returns the folder."""
    make_model(case).save_pretrained(folder, **save_options)
    return folder
