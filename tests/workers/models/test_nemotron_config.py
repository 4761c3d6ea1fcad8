"""config.json of Nemotron-H: as it is published, by both names of blocks, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tandem.cache.kernels.recurrent import SsdShape
from tandem.workers.checkpoint.errors import InvalidConfig, ModelError, UnsupportedFeature
from tandem.workers.models.activation import SquaredRelu
from tandem.workers.models.recurrent.fields import Mamba2Config
from tandem.workers.models.registry import load_config
from tandem.workers.models.routing import GroupLimit, Routing
from tandem.workers.runner.model_cache import kv_layout
from tests.workers.models.test_config import LLAMA, write

NEMOTRON = {
    **{name: value for name, value in LLAMA.items() if name != "num_hidden_layers"},
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*M-",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
# Nemotron-H-8B and Nemotron-3-Nano-30B, as far as their sizes say what layers are.
DENSE: dict[str, Any] = {
    **NEMOTRON,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "residual_in_fp32": False,
    "time_step_limit": [0.0, float("inf")],
}
SPARSE: dict[str, Any] = {
    **DENSE,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "moe_latent_size": None,
}


@pytest.mark.parametrize(("fields", "counts"), [(DENSE, (24, 4, 24)), (SPARSE, (23, 6, 23))])
def test_published_models(tmp_path: Path, fields: dict[str, Any], counts: tuple[int, ...]) -> None:
    config = load_config(write(tmp_path, fields))
    assert (config.num_layers, config.head_dim, config.activation) == (52, 128, SquaredRelu())
    layout = kv_layout(config, 16)
    attended, states = layout.groups
    assert (len(states.layers), len(attended.layers), len(layout.keepless)) == counts
    heads = fields["mamba_num_heads"]
    assert isinstance(config.recurrent, Mamba2Config)
    assert config.recurrent.shape == SsdShape(num_heads=heads, groups=8, head_dim=64, state_size=128, tail=3)
    assert layout.entry_bytes(1) == counts[0] * 4 * (heads * 64 * 128 + 3 * (heads * 64 + 2 * 8 * 128))
    if fields is SPARSE:
        assert config.moe is not None
        assert (config.moe.layers, config.moe.shared_size) == (frozenset(layout.keepless), 3712)
        limit = GroupLimit(1, 1, counted=2)
        routing = Routing(6, normalize=True, scores="sigmoid", groups=limit, corrected=True, scale=2.5)
        assert config.moe.routing == routing


def test_blocks_have_two_spellings(tmp_path: Path) -> None:
    written = load_config(write(tmp_path, NEMOTRON))
    for names in (
        ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        ["mamba", "moe", "attention", "mamba", "mlp"],
    ):
        given = {**NEMOTRON, "hybrid_override_pattern": "ignored", "layers_block_type": names}
        assert load_config(write(tmp_path, given)) == written
    without = load_config(write(tmp_path, {**NEMOTRON, "hybrid_override_pattern": "-*"}))
    assert (without.recurrent, without.moe) == (None, None)
    assert [without.has_mixer(layer) for layer in range(2)] == [False, True]


def test_what_is_absent(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, NEMOTRON))
    assert (config.rms_norm_eps, config.head_dim, config.rope.rope_type) == (1e-5, 128, "none")
    assert isinstance(config.recurrent, Mamba2Config)
    assert dataclasses.astuple(config.recurrent.shape) == (3, 128, 8, 64, 128)
    assert (config.recurrent.biased, config.recurrent.conv_biased) == (False, True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hybrid_override_pattern": "MM-"}, UnsupportedFeature, "hybrid_override_pattern has no attention; at least"),
        ({"hybrid_override_pattern": "M*x"}, InvalidConfig, "is 'M.x'; it must be one of M, .*, -, E for each of 1 to"),
        ({"hybrid_override_pattern": ""}, InvalidConfig, "for each of 1 to 1000 layers"),
        ({"hybrid_override_pattern": None}, InvalidConfig, "layers_block_type is None; it must be a list of linear_at"),
        ({"layers_block_type": ["mlp", "rnn"]}, InvalidConfig, "it must be one of linear_attention, mamba, full_att"),
        ({"mamba_num_heads": 12}, InvalidConfig, "mamba_num_heads is 12; it must be a multiple of n_groups, 8"),
        ({"conv_kernel": 1}, InvalidConfig, "conv_kernel is 1; it must be an integer of at least 2"),
        ({"mlp_hidden_act": "silu"}, UnsupportedFeature, "mlp_hidden_act is 'silu'; only relu2 are implemented"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedFeature, "mamba_hidden_act is 'gelu'; only 'silu' is served"),
        ({"attention_bias": True}, UnsupportedFeature, "attention_bias is True; only False is served"),
        ({"moe_latent_size": 0}, InvalidConfig, "moe_latent_size is 0; it must be an integer of at least 1"),
        ({"time_step_limit": [0.0, 0.1]}, UnsupportedFeature, r"time_step_limit is \[0.0, 0.1\]; only 0 and infinity"),
    ],
)
def test_what_is_not_served(tmp_path: Path, changes: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_config(write(tmp_path, {**NEMOTRON, **changes}))


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    load_config(write(tmp_path, {**NEMOTRON, "time_step_limit": [0.0, {"__float__": "Infinity"}]}))
