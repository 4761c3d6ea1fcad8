"""DeepSeek-V4's shape with few layers, a tiny one with layers of the same kinds, and a dense model beside each.

A layer of V4 has a window alone, or also entries of 128 positions, all of which it attends to (HCA), or entries of 4,
of which it chooses top_k by index keys (CSA). The dense model keeps a latent for each position, as DeepSeek-V3 does,
and attends to all of them. It has as many layers, heads and experts, of the same sizes, but a plain residual.
"""

from dataclasses import dataclass
from typing import Any

KINDS = {"window": "sliding_attention", "HCA": "heavily_compressed_attention", "CSA": "compressed_sparse_attention"}
LAYERS = ("window", "HCA", "CSA", "HCA", "CSA")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """compressed, dense: a config.json each. The others are what is measured where no option says so. contexts: in
    positions, ascending; prompt, chunk: in tokens. cut: what is smaller than in the model."""

    compressed: Fields
    dense: Fields
    contexts: tuple[int, ...]
    prompt: int
    chunk: int
    cut: Fields


COMMON: Fields = {
    "num_hidden_layers": len(LAYERS),
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rope_theta": 10_000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
COMPRESSED: Fields = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "compress_rope_theta": 160_000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "layer_types": [KINDS[name] for name in LAYERS],
    "mlp_layer_types": ["hash_moe"] + ["moe"] * (len(LAYERS) - 1),
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
}
DENSE: Fields = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
V4: Fields = {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
}
TINY: Fields = {
    "vocab_size": 512,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
}
SHAPES = {
    "v4": Shape(
        compressed=COMMON
        | COMPRESSED
        | V4
        | {
            "head_dim": 512,
            "sliding_window": 128,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 512,
        },
        dense=COMMON
        | DENSE
        | V4
        | {
            "num_key_value_heads": 64,
            "intermediate_size": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        contexts=(8192, 65_536, 524_288),
        prompt=32_768,
        chunk=8192,
        cut={"num_hidden_layers": "5 of 43", "n_routed_experts": "64 of 256", "hash_moe": "1 of 3"},
    ),
    "tiny": Shape(
        compressed=COMMON
        | COMPRESSED
        | TINY
        | {
            "head_dim": 32,
            "sliding_window": 24,
            "o_groups": 2,
            "o_lora_rank": 32,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 64,
        },
        dense=COMMON
        | DENSE
        | TINY
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        contexts=(256, 1024, 4096),
        prompt=1024,
        chunk=256,
        cut={},
    ),
}
