"""DeepSeek-V4 with published names and fields, and checkpoints that are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cache.operations import forwards
from tandem.cluster.config.cluster_config import load_config as load_cluster_config
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.drafter_config import check_drafter, load_drafter_config
from tandem.workers.models.kv_scales import choose_scales
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights, load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.island import running_island
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt

CHUNK, OUTPUT = 40, 12
HASHED = "layers.0.ffn.gate.tid2eid"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint("deepseek_v4", tmp_path)


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Rewrites fields of config.json; None removes a field."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def publish(folder: Path) -> None:
    """Gives tensors the published names, and adds a tensor of a layer that is not served."""
    path, named = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
        named[name] = tensor
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", HASHED} <= set(named)
    save_file({**named, "mtp.0.e_proj.weight": torch.zeros(2, 2)}, path, {"format": "pt"})


def test_published_names_and_fields(folder: Path) -> None:
    oracle, written = load_oracle(folder), load_config(folder)
    prompts = [random_prompt(length, seed=length) for length in (1, 31, 33, 2 * CHUNK + 5)]
    expected = greedy_all(oracle, prompts, OUTPUT)
    publish(folder)
    old = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters")
    rewrite(folder, dict.fromkeys(old))
    rewrite(
        folder,
        {
            "compress_ratios": [0, 128, 4, 4, 0],
            "compress_rate_hca": 32,
            "qk_rope_head_dim": 8,
            "num_hash_layers": 1,
            "rope_theta": 10_000.0,
            "compress_rope_theta": 160_000.0,
            "rope_scaling": YARN,
        },
    )
    config = load_config(folder)
    assert config.compressed == written.compressed
    assert config.rope == written.rope
    assert config.local_rope == written.local_rope
    assert config.local_rope is not None
    assert config.local_rope.rope_type == "default"  # windows alone are not scaled
    assert config.moe is not None
    assert config.moe.hashed == {0}
    rewrite(folder, {"mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"]})
    with running_island(folder, {"scheduler.max_batch_tokens": CHUNK}) as island:
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected


def test_prompts_by_token_land_where_they_are_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes and sends them so: inputs token by token, entries when they are complete. Digests of what was sent
    and of what landed are compared."""
    monkeypatch.setattr(forwards, "takes_by_token", lambda groups, tokens: tokens.trees is None)
    prompts = [random_prompt(length, seed=length) for length in (1, 3, 31, 33, 2 * CHUNK + 5)]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    with running_island(folder, {"scheduler.max_batch_tokens": CHUNK}) as island:
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected


@pytest.mark.gate("9")
@pytest.mark.parametrize("beyond", [1, 9])
def test_a_prefix_is_found_again_on_both_sides(folder: Path, beyond: int) -> None:
    """Pages of entries for 32 positions: prefixes of 32, 64, … positions are shared."""
    oracle, prefix = load_oracle(folder), random_prompt(96, 0)
    settings = {"scheduler.max_batch_tokens": CHUNK, "cache.prefix_sharing": True}
    with running_island(folder, settings) as island:
        for seed in range(3):
            prompt = prefix + random_prompt(beyond, seed)
            updates = complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)
            assert tokens_of(updates) == greedy(oracle, prompt, OUTPUT)
            assert updates[-1].usage is not None
            assert updates[-1].usage.cached_tokens == (96 if seed else 0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_key_value_heads": 2}, UnsupportedFeature, "num_key_value_heads is 2; only 1 is served"),
        ({"attention_bias": True}, UnsupportedFeature, "attention_bias is True; only False is served"),
        ({"norm_topk_prob": False}, UnsupportedFeature, "norm_topk_prob is False; only True is served"),
        ({"scoring_func": "tanh"}, UnsupportedFeature, "scoring_func is 'tanh'; only sqrtsoftplus, sigmoid, softmax"),
        ({"expert_dtype": "int4"}, UnsupportedFeature, "expert_dtype is 'int4'; it must be 'fp4' or 'fp8'"),
        ({"o_groups": 3}, InvalidConfig, "o_groups is 3; it must be a divisor of num_attention_heads, 4"),
        ({"layer_types": ["full_attention"] * 4}, InvalidConfig, "layer_types is .* one of sliding_attention, comp"),
        ({"layer_types": None, "compress_ratios": [0, 3, 4, 4]}, InvalidConfig, "compress_ratios is "),
        ({"mlp_layer_types": ["moe"]}, InvalidConfig, "mlp_layer_types is .* for each of 4 layers"),
        ({"compress_rates": {"other": 4}}, UnsupportedFeature, "compress_rates has .*other"),
        ({"partial_rotary_factor": 0.1, "rope_parameters": None}, InvalidConfig, "that is even and at least 2"),
        ({"index_head_dim": 6}, InvalidConfig, "index_head_dim is 6; it must be at least the 8 rotated numbers"),
        ({"num_experts_per_tok": 9}, InvalidConfig, "at most the number of experts, 8"),
        (
            {"rope_parameters": {kind: {"rope_type": "dynamic", "factor": 2.0} for kind in ("main", "compress")}},
            UnsupportedFeature,
            "rope_type is 'dynamic'; DeepSeek-V4 is served with default, yarn",
        ),
    ],
)
def test_what_is_not_served(folder: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    rewrite(folder, changes)
    with pytest.raises(error, match=message):
        load_config(folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(199, 3), "tid2eid has torch.float32; DeepseekV4ForCausalLM has torch.int64"),
        (torch.zeros(199, 2, dtype=torch.int64), r"tid2eid has shape \[199, 2\]; config.json asks for \[199, 3\]"),
    ],
)
def test_tables_that_do_not_fit(folder: Path, table: torch.Tensor, message: str) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), f"model.{HASHED}": table}, path, {"format": "pt"})
    with pytest.raises(InvalidWeights, match=message):
        check_weights(folder, load_config(folder))


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_of_experts_that_are_not_there(folder: Path, expert: int) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[f"model.{HASHED}"][7, 1] = expert
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"the experts of token ids are -?[01] … [78]; they must be from 0 to 7"):
        load_decoder(folder, load_config(folder))


def test_integers_are_no_other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(64, dtype=torch.int64)}, path, {"format": "pt"})
    with pytest.raises(InvalidWeights, match=r"tensor model.norm.weight has torch.int64; .* has torch.float32"):
        check_weights(folder, load_config(folder))


def test_a_table_of_32_bits(folder: Path) -> None:
    path, prompt = folder / "model.safetensors", random_prompt(50, 0)
    expected = greedy(load_oracle(folder), prompt, OUTPUT)
    weights = load_file(path)
    tables = {name: tensor.int() for name, tensor in weights.items() if name.endswith("tid2eid")}
    save_file({**weights, **tables}, path, {"format": "pt"})
    with running_island(folder) as island:
        assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == expected


def test_8_bits_and_drafters_are_refused(folder: Path) -> None:
    model = load_config(folder)
    settings = {"model.path": str(folder), "cache.kv_cache_dtype": "fp8_e4m3"}
    worker = worker_configs(load_cluster_config(None, settings), 64)[0]
    with pytest.raises(Exception, match="DeepseekV4ForCausalLM keeps K and V in one plane"):
        choose_scales(worker, model)
    for method in ("mtp", "eagle3"):
        with pytest.raises(UnsupportedFeature, match="has no single residual that a drafter could take"):
            load_drafter_config(SpeculationSettings(method=method, draft=str(folder)), model)
    with pytest.raises(UnsupportedFeature, match="which does not serve as a drafter"):
        check_drafter(str(folder), model)
