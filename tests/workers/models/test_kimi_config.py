"""config.json of Kimi Linear: as it is published and as transformers writes it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from tandem.cache.kernels.recurrent import KdaShape
from tandem.workers.checkpoint.errors import InvalidConfig, ModelError, UnsupportedFeature
from tandem.workers.models.recurrent.fields import KdaConfig
from tandem.workers.models.registry import load_config
from tandem.workers.models.routing import GroupLimit, Routing
from tandem.workers.runner.model_cache import kv_layout
from tests.workers.models.test_config import LLAMA, write

FULL = [4, 8, 12, 16, 20, 24, 27]
# Kimi-Linear-48B-A3B, as far as its sizes say what layers are.
PUBLISHED: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name != "max_position_embeddings"},
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "head_dim": 72,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "model_max_length": 1048576,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "use_grouped_topk": True,
}


def test_the_published_model(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, PUBLISHED))
    assert (config.max_positions, config.rms_norm_eps, config.rope.rope_type) == (1048576, 1e-5, "none")
    assert (config.num_extra_layers, config.attn_scale) == (0, 192**-0.5)
    assert isinstance(config.recurrent, KdaConfig)
    assert config.recurrent.shape == KdaShape(key_heads=32, value_heads=32, key_dim=128, value_dim=128, tail=3)
    latents, states = kv_layout(config, 16).groups
    assert (latents.layers, len(states.layers)) == (tuple(layer - 1 for layer in FULL), 20)
    assert config.moe is not None
    assert (config.moe.layers, config.moe.shared_size) == (frozenset(range(1, 27)), 1024)
    limit = GroupLimit(1, 1, counted=2)
    routing = Routing(8, normalize=True, scores="sigmoid", groups=limit, corrected=True, scale=2.446)
    assert config.moe.routing == routing


def test_names_that_transformers_writes(tmp_path: Path) -> None:
    kinds = ["full_attention" if layer + 1 in FULL else "linear_attention" for layer in range(27)]
    given: dict[str, Any] = {
        **{name: value for name, value in PUBLISHED.items() if name != "linear_attn_config"},
        **{"layer_types": kinds, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
        "mlp_layer_types": ["dense", *["sparse"] * 26],
    }
    assert load_config(write(tmp_path, given)) == load_config(write(tmp_path, PUBLISHED))
    del given["layer_types"]
    without = load_config(write(tmp_path, given))
    assert without.recurrent is not None
    assert without.recurrent.layers == frozenset(range(27)) - {4, 8, 12, 16, 20, 24}


def linear(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {**PUBLISHED["linear_attn_config"], **changes}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            linear(kda_layers=[1, 2]),
            InvalidConfig,
            r"kda_layers is \[1, 2\]; it must be the layers of 1 to 27 that full",
        ),
        (
            linear(kda_layers=list(range(1, 28)), full_attn_layers=[]),
            UnsupportedFeature,
            "all 27 layers keep recurrent states; at least one of full_attention is served",
        ),
        (
            linear(short_conv_kernel_size=1),
            InvalidConfig,
            "short_conv_kernel_size is 1; it must be an integer of at lea",
        ),
        (
            {"layer_types": ["mamba"] * 27},
            InvalidConfig,
            "it must be linear_attention or full_attention for each of 27",
        ),
        (linear(gate_lower_bound=-5.0), UnsupportedFeature, "gate_lower_bound is -5.0; only None is served"),
        (linear(use_full_rank_gate=True), UnsupportedFeature, "use_full_rank_gate is True; only False is served"),
        ({"mla_use_nope": False}, UnsupportedFeature, "mla_use_nope is False; only True is served"),
        (
            {"moe_router_activation_func": "softmax"},
            UnsupportedFeature,
            "moe_router_activation_func is 'softmax'; only",
        ),
        ({"num_experts": None}, InvalidConfig, "n_routed_experts is missing"),
    ],
)
def test_what_is_not_served(tmp_path: Path, changes: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_config(write(tmp_path, {**PUBLISHED, **changes}))
