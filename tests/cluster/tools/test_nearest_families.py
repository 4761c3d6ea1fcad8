"""Families are near by what config.json says of layers. Fields are those of published checkpoints."""

import pytest

from tandem.cluster.tools.nearest_families import families, nearest_families
from tandem.workers.checkpoint.architectures import FAMILIES

DENSE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
EXPERTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
PUBLISHED = {
    "Falcon": {"alibi": True, "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True},
    "GPT-2": {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "n_head": 12},
    "Qwen1.5-MoE": {**DENSE, **EXPERTS, "shared_expert_intermediate_size": 5632, "sliding_window": 32768},
    "OLMo 2": {**DENSE, "attention_bias": False, "mlp_bias": False},
    "Exaone 4": {**DENSE, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    "MiniCPM": {**DENSE, "scale_depth": 1.4},
    "Yi": DENSE,
    "few fields": {**DENSE, "num_experts": 60, "num_experts_per_tok": 4, "n_shared_experts": 1},
    "all at once": {
        **DENSE,
        **EXPERTS,
        "mamba_d_state": 16,
        "kv_lora_rank": 512,
        "attention_chunk_size": 8192,
        "encoder_layers": 2,
    },
}
PUBLISHED["Qwen1.5-MoE"]["use_sliding_window"] = False


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Falcon", "its fields tell of ALiBi, LayerNorm and parallel blocks, which no served family has"),
        ("GPT-2", "its fields tell of LayerNorm and learned positions, which no served family has"),
        ("Qwen1.5-MoE", "the nearest is Qwen3MoeForCausalLM, which has no shared experts"),
        (
            "few fields",
            "Glm4MoeForCausalLM, which also has groups of experts; or Qwen3MoeForCausalLM, which has no shared experts",
        ),
        ("OLMo 2", "the nearest is LlamaForCausalLM, which has attention and dense feed-forwards, too"),
        ("Exaone 4", "the nearest is Gemma3ForCausalLM, which has sliding windows, too"),
        ("MiniCPM", "its fields tell of scaled residuals, which no served family has"),
        ("Yi", "the nearest is LlamaForCausalLM or MistralForCausalLM or Phi3ForCausalLM, which have attention"),
        (
            "all at once",
            "Mamba layers, an encoder, attention in chunks, experts and latent attention, which no served family",
        ),
    ],
)
def test_the_nearest_is_named_and_how_it_differs(model: str, said: str) -> None:
    assert said in nearest_families(PUBLISHED[model])


def test_all_families_are_compared() -> None:
    named = {one.architecture for one in families()}
    assert named <= set(FAMILIES)
    of_text = {name for name in FAMILIES if "ConditionalGeneration" not in name}
    assert of_text <= named
