"""config.json of GLM-4-MoE: what is absent is as in transformers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from tandem.workers.checkpoint.errors import InvalidConfig, ModelError, UnsupportedFeature
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.registry import load_config
from tandem.workers.models.routing import GroupLimit, Routing
from tests.workers.models.test_config import LLAMA, write

GLM: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
LITE: dict[str, Any] = {
    **GLM,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}
MTP = SpeculationSettings("mtp", 3, 32)


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}])
def test_what_is_absent_is_as_in_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    from transformers import Glm4MoeConfig

    config, theirs = load_config(write(tmp_path, {**GLM, **rope})), Glm4MoeConfig(**{**GLM, **rope})
    rotation: Any = theirs.rope_parameters
    assert config.rope.rotary_dim == int(config.head_dim * rotation["partial_rotary_factor"]) == 8
    assert (config.rope.theta, config.rms_norm_eps) == (rotation["rope_theta"], theirs.rms_norm_eps)
    assert (config.qk_norm, config.qkv_bias, config.num_extra_layers) == (False, False, 1)
    assert config.moe is not None
    assert (config.moe.layers, config.moe.shared_size) == ({1}, 40)
    limit = GroupLimit(1, 1, counted=2)
    assert config.moe.routing == Routing(3, normalize=True, scores="sigmoid", groups=limit, corrected=True, scale=1.0)


def test_what_is_absent_of_the_lite_model_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers import Glm4MoeLiteConfig

    config, theirs = load_config(write(tmp_path, LITE)), Glm4MoeLiteConfig(**LITE)
    rotation: Any = theirs.rope_parameters
    assert (config.rope.theta, config.rms_norm_eps) == (rotation["rope_theta"], theirs.rms_norm_eps)
    assert config.num_extra_layers == 1
    assert config.latent is not None
    assert (config.latent.rank, config.latent.q_rank, config.latent.query_dim) == (32, 48, 40)
    assert config.moe is not None
    assert theirs.mlp_layer_types == ["dense", "sparse"]
    assert (config.moe.layers, config.moe.shared_size) == ({1}, 40)
    limit = GroupLimit(1, 1, counted=2)
    assert config.moe.routing == Routing(3, normalize=True, scores="sigmoid", groups=limit, corrected=True, scale=1.8)


def test_q_k_and_v_have_a_bias_alone(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {**GLM, "attention_bias": True, "use_qk_norm": True}))
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, True)


@pytest.mark.parametrize(("layers", "message"), [(0, "has 0 layers for multi-token"), (2, "has 2 layers for")])
def test_a_checkpoint_without_one_layer_that_drafts_is_refused_as_a_drafter(
    tmp_path: Path, layers: int, message: str
) -> None:
    config = load_config(write(tmp_path, {**GLM, "num_nextn_predict_layers": layers}))
    with pytest.raises(UnsupportedFeature, match=message):
        load_drafter_config(MTP, config)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n_group": 3}, InvalidConfig, "n_group is 3; it must be a divisor of the number of experts, 8"),
        ({"scoring_func": "softmax"}, UnsupportedFeature, "scoring_func is 'softmax'; only 'sigmoid' is served"),
        ({"num_experts_per_tok": 9}, InvalidConfig, "num_experts_per_tok is 9"),
        ({"partial_rotary_factor": 0.0}, InvalidConfig, "rotary_dim is 0"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_config(write(tmp_path, {**GLM, **fields}))
