"""The fields of config.json in random checkpoints, by family. `tandem` lists the names, so imports here are light."""

COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
          "vocab_size", "max_position_embeddings")  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(COMMON, (2, 64, 4, 2, 176, 512, 2048), strict=True)),
    "small": dict(zip(COMMON, (4, 256, 8, 4, 688, 2048, 4096), strict=True)),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK = {
    **EXPERTS,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": None,
}
RECURRENT = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
INDEXED = {"q_lora_rank": 48, "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 64}
# What each family writes into config.json besides the common fields.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **DEEPSEEK,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **DEEPSEEK, "q_lora_rank": 48},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **DEEPSEEK, **INDEXED},
    "deepseek_v4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 32,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        "num_hash_layers": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "index_n_heads": 16,  # with 8, two of the scores of a query are both 0 now and then
        "index_head_dim": 16,
        "index_topk": 64,
        "rope_parameters": {kind: {**ROPE, "partial_rotary_factor": 0.25} for kind in ("main", "compress")},
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "rope_parameters": {"full_attention": {**ROPE, "rope_theta": 1e6}, "sliding_attention": ROPE},
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": 32,
        "sliding_window": 512,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 2048,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": ROPE,
        },
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        **EXPERTS,
        "use_qk_norm": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        **DEEPSEEK,
        "q_lora_rank": 48,
        "num_key_value_heads": 4,
    },
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"], **DEEPSEEK, **INDEXED},
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 512,
    },
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "pad_token_id": None,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "llama4": {
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 16,
        "intermediate_size": 64,
        "intermediate_size_mlp": 176,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 512,
        "no_rope_layer_interval": 2,
        "rope_parameters": {**ROPE, "rope_theta": 5e5},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "ME*M-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None, "pad_token_id": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "use_sliding_window": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], **RECURRENT, **SHARED_EXPERT},
    "qwen3_5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **RECURRENT},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **RECURRENT,
        **SHARED_EXPERT,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"]},
    "t5gemma": {"architectures": ["T5GemmaForConditionalGeneration"], "is_encoder_decoder": True},
}
# The families that may have a layer for multi-token prediction which drafts, and the field that counts such layers.
MTP_FIELDS: dict[str, str] = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"), "num_nextn_predict_layers"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "mtp_num_hidden_layers"),
}
# The families whose configs have an object for each half: what these write besides the common fields.
HALVES: dict[str, dict[str, object]] = {
    "t5gemma": {
        "model_type": "t5_gemma_module",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
    }
}


def config_fields(arch: str, size: str, dtype: str, *, mtp: bool = False) -> dict[str, object]:
    """Returns config.json without special tokens. arch: of ARCHITECTURES; size: of SIZES; dtype: as config.json names
    it. mtp: with a layer for multi-token prediction; arch is then of MTP_FIELDS."""
    sizes = SIZES[size]
    common: dict[str, object] = {
        **sizes,
        "model_type": arch,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if arch not in HALVES:
        return {**common, **ARCHITECTURES[arch], **({MTP_FIELDS[arch]: 1} if mtp else {})}
    whole = {name: common[name] for name in ("model_type", "vocab_size", "tie_word_embeddings", "dtype")}
    halves = {name: {**common, **HALVES[arch]} for name in ("encoder", "decoder")}
    return {**whole, **ARCHITECTURES[arch], **halves}
