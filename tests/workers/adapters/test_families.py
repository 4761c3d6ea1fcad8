"""Adapters of each family's projections: greedy tokens in float32 equal PEFT's, or those of merged weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapted_model import AdaptedModel
from tests.support.adapter_workers import expected
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle, random_prompt

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
SHARED = tuple(f"shared_experts.{one}" for one in GATED)
DENSE = tuple(f"layers.0.mlp.{one}" for one in GATED)
KDA = ("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj")
DELTA = ("in_proj_qkvz", "in_proj_ba", "out_proj")
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ATTENTION + GATED,
    "deepseek_v3": LATENT + DENSE + SHARED,
    "gpt_oss": ATTENTION,
    "qwen3_moe": ATTENTION,
    "qwen3_next": (*ATTENTION, *DELTA, *(f"shared_expert.{one}" for one in GATED), "shared_expert_gate"),
    "deepseek_v2": LATENT + DENSE + SHARED,
    "gemma2": ATTENTION + GATED,
    "gemma3": ATTENTION + GATED,
    "gemma4": ATTENTION + GATED,
    "glm4_moe": ATTENTION + DENSE + SHARED,
    "kimi_linear": (*ATTENTION, "kv_a_proj_with_mqa", *KDA, *DENSE, *SHARED),
    "llama4": ATTENTION + GATED,
    "mistral": ATTENTION + GATED,
    "mixtral": ATTENTION,
    "nemotron_h": (*ATTENTION, "in_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen2": ATTENTION + GATED,
    "qwen3_5": (*ATTENTION, *GATED, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    "seed_oss": ATTENTION + GATED,
}
MERGED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear", "qwen3_next")  # for which see merged()
TOKENS = 6


@pytest.mark.gate("deepseek_v3")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracles(family: str, tmp_path: Path) -> None:
    """Rows of two adapters and one of none in each step. The first one's prompt comes in two chunks."""
    folder = save_checkpoint(family, tmp_path / "model")
    oracle: Any = load_oracle(folder)
    folders = [save_adapter(oracle, tmp_path / str(seed), FAMILIES[family], seed=seed) for seed in (1, 2)]
    prompts = {row: random_prompt(length, row) for row, length in enumerate((40, 33, 21))}
    peft = family not in MERGED
    wanted = [expected(oracle, one, prompts[row], TOKENS, peft=peft) for row, one in enumerate((*folders, None))]
    model = AdaptedModel(folder, folders, slots=2, rank=4)
    for row, adapter in enumerate((0, 1, None)):
        model.add(row, adapter)
    firsts = model.in_chunks(prompts, {0: 17})
    rest = model.steps(dict(enumerate(firsts)), TOKENS - 1)
    assert [[first, *row] for first, *row in zip(firsts, *rest, strict=True)] == wanted
    others = [expected(oracle, None, prompts[row], TOKENS) for row in (0, 1)]
    assert wanted[0] != others[0]
    assert wanted[1] != others[1]
