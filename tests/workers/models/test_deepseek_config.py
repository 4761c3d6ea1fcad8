"""config.json of DeepSeek-V2 and V3 into ModelConfig."""

import math
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.checkpoint.errors import InvalidConfig, UnsupportedFeature
from tandem.workers.models.indexer.fields import IndexConfig
from tandem.workers.models.registry import load_config
from tandem.workers.models.routing import GroupLimit, Routing
from tests.workers.models.test_config import LLAMA, write

DEEPSEEK = {
    **LLAMA,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
}
V2 = {**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"]}
V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]}
V32 = {**DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 5}
GLM = {**V32, "architectures": ["GlmMoeDsaForCausalLM"]}


def test_deepseek(tmp_path: Path) -> None:
    """Absent fields have transformers' defaults."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1, "mscale_all_dim": 0.5}
    v2 = load_config(write(tmp_path, {**V2, "q_lora_rank": None, "rope_scaling": yarn}))
    assert v2.latent is not None
    assert v2.moe is not None
    assert (v2.latent.q_rank, v2.latent.query_dim, v2.rope.rotary_dim) == (None, 40, 16)
    assert v2.attn_scale == pytest.approx(40**-0.5 * (0.1 * 0.5 * math.log(40) + 1) ** 2)
    assert (v2.moe.layers, v2.moe.shared_size, v2.moe.routing) == ({0, 1}, 80, Routing(3, normalize=False))
    v3 = load_config(write(tmp_path, {**V3, "first_k_dense_replace": 1}))
    assert v3.latent is not None
    assert v3.moe is not None
    groups = GroupLimit(4, 2, counted=2)
    assert (v3.latent.q_rank, v3.moe.layers, v3.moe.shared_size, v3.num_extra_layers) == (1536, {1}, 40, 1)
    assert v3.moe.routing == Routing(3, normalize=True, scores="sigmoid", groups=groups, corrected=True, scale=2.5)


def indexer_of(folder: Path, fields: dict[str, Any]) -> IndexConfig:
    config = load_config(write(folder, fields))
    assert config.latent is not None
    assert config.latent.index is not None
    return config.latent.index


def test_indexers(tmp_path: Path) -> None:
    """Absent fields have transformers' defaults; GLM's layers may share."""
    assert indexer_of(tmp_path, V32) == IndexConfig(64, 128, 2048, (0, 1, 2, 3, 4), interleaved=False)
    sizes = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 5}
    assert indexer_of(tmp_path, {**V32, **sizes}) == IndexConfig(8, 32, 5, (0, 1, 2, 3, 4), interleaved=False)
    assert indexer_of(tmp_path, GLM) == IndexConfig(32, 128, 2048, (0, 1, 2, 3, 4), interleaved=True)
    kinds = ["full", "shared", "full", "shared", "shared"]
    for fields in ({"indexer_types": kinds}, {"index_topk_pattern": "FSFSS"}, {"index_topk_pattern": kinds}):
        assert indexer_of(tmp_path, {**GLM, **fields}).layers == (0, 2)
    assert indexer_of(tmp_path, {**GLM, "index_topk_freq": 3}).layers == (0, 1, 4)
    for kind in ("indexed_attention", "deepseek_sparse_attention"):
        assert load_config(write(tmp_path, {**V32, "layer_types": [kind] * 5})).num_layers == 5
    config = load_config(write(tmp_path, {**V32, "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"]}))
    assert config.moe is not None
    assert config.moe.layers == {0, 2}


def test_null_is_false_where_transformers_takes_it_for_that(tmp_path: Path) -> None:
    """Null is not the default, which is true."""
    v3 = load_config(write(tmp_path, {**V3, "norm_topk_prob": None, "rope_interleave": None}))
    assert v3.latent is not None
    assert v3.moe is not None
    assert (v3.moe.routing.normalize, v3.latent.interleaved) == (False, False)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({**V2, "norm_topk_prob": True}, UnsupportedFeature, "norm_topk_prob is True; only False is served"),
        ({**V2, "topk_method": "noaux_tc"}, UnsupportedFeature, "topk_method is 'noaux_tc'; only greedy"),
        ({**V2, "moe_layer_freq": 2}, UnsupportedFeature, "moe_layer_freq is 2; only 1 is served"),
        ({**V3, "scoring_func": "softmax"}, UnsupportedFeature, "scoring_func is 'softmax'; only 'sigmoid' is served"),
        ({**V3, "n_group": 8}, InvalidConfig, "n_group is 8; it must be a divisor of the number of experts, 8"),
        ({**V3, "topk_group": 1}, InvalidConfig, "topk_group is 1; it must be at most n_group, 4, and enough for"),
        ({**V3, "qk_rope_head_dim": 15}, InvalidConfig, "qk_rope_head_dim is 15; it must be even"),
        ({**V32, "q_lora_rank": None}, UnsupportedFeature, "q_lora_rank is null; an indexer takes what"),
        ({**V32, "index_head_dim": 16}, UnsupportedFeature, "index_head_dim is 16; more than qk_rope_head_dim, 16, is"),
        ({**V32, "mlp_bias": True}, UnsupportedFeature, "mlp_bias is True; only False is served"),
        ({**V32, "layer_types": ["full_attention"] * 5}, UnsupportedFeature, "only indexed_attention is served"),
        ({**V32, "mlp_layer_types": ["dense"]}, InvalidConfig, "it must be dense or sparse for each of 5 layers"),
        (
            {**GLM, "indexer_types": ["shared"] * 5},
            InvalidConfig,
            "it must be full for layer 0, for it has none before",
        ),
        ({**GLM, "index_topk_pattern": "FX"}, InvalidConfig, "it must be full or shared for each of 5 layers"),
        (
            {**V3, "quantization_config": {"quant_method": "hqq"}},
            UnsupportedFeature,
            "quant_method is 'hqq'; it must",
        ),
    ],
)
def test_deepseeks_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_config(write(tmp_path, fields))
