"""Models whose drafts hold as often as is wanted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.workers.models.registry import load_config
from tests.benchmarks.drafted_models import FIRST_LIVE, Ring, write_draft, write_target
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.mtp import AIR, HYBRID, TINY
from tests.support.client_requests import complete_all
from tests.support.island import running_island
from tests.support.oracle import random_prompt

ROOT = Path(__file__).resolve().parents[2]
TINY_HYBRID = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 32,
    "torch_dtype": "float32",
    "vocab_size": 512,
}


def chances(folder: Path) -> torch.Tensor:
    """[vocabulary, vocabulary]: of each token behind each, as embedding and head have it."""
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    normed = embedding / embedding.square().mean(1, keepdim=True).sqrt()
    return (normed @ head.T).softmax(1)


@pytest.mark.parametrize("holds", [0.5, 0.7, 0.9])
def test_the_next_token_of_the_ring_comes_as_often_as_is_wanted(holds: float, tmp_path: Path) -> None:
    target = write_target(AIR | TINY, tmp_path / "target", holds)
    ring, found = Ring.of(load_config(target), holds), chances(target)
    tokens = torch.arange(found.shape[0])
    live = slice(FIRST_LIVE, FIRST_LIVE + ring.size)
    torch.testing.assert_close(found[tokens, FIRST_LIVE + ring.next(tokens)], torch.full(tokens.shape, holds**0.5))
    torch.testing.assert_close(found[:, live].sum(1), torch.ones(found.shape[0]))


def test_a_draft_model_is_sure_and_wrong_behind_some_tokens(tmp_path: Path) -> None:
    target = write_target(AIR | TINY, tmp_path / "target", 0.7)
    ring = Ring.of(load_config(target), 0.7)
    found = chances(write_draft(target, tmp_path / "draft", 0.7))
    live = torch.arange(FIRST_LIVE, FIRST_LIVE + ring.size)
    drafted = found[live].argmax(1)
    assert found[live].amax(1).min() > 0.999
    assert int((drafted != FIRST_LIVE + ring.next(live)).sum()) == ring.wrong == 3


@pytest.mark.long
def test_drafts_of_each_method_hold_as_often_as_is_wanted() -> None:
    """Each of 3 tokens holds with 0.7 if the one before does, so (0.7 + 0.49 + 0.34) / 3 are accepted."""
    methods = ("ngram", "draft_model", "mtp", "eagle3")
    arguments = ["--gpus", "0", "--shape", "tiny", "--mixes", "C", "--rates", "2", "--window", "6", "--roles"]
    arguments += ["colocated", "--speculation", *methods, "--product-tflops", "1", "--copy-tbs", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.goodput", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["mixes"]["C"]
    for method in methods:
        (numbers,) = targets[f"colocated {method} http"]["rates"].values()
        assert numbers["drafted"] > 1000
        assert numbers["accepted"] == pytest.approx(0.5, abs=0.08)
        assert numbers["messages_tokens"] > 1.5
        assert numbers["token_to_off"] > 0


@pytest.mark.long
def test_drafts_of_a_hybrid_model_hold_as_often_as_is_wanted(tmp_path: Path) -> None:
    """The model's norms have an offset, and three of its layers keep states."""
    target = write_target(COMMON | SHAPES[HYBRID] | TINY_HYBRID, tmp_path / "target", 0.7)
    prompts = [random_prompt(40 + 10 * number, number, 512) for number in range(8)]
    with running_island(target, {"speculation.method": "mtp"}) as island, island.client() as client:
        complete_all(island.address, prompts, max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
        (info,) = client.cluster_info().islands
        counters = info.workers[1].counters
        assert counters.drafted_tokens > 500
        assert counters.accepted_tokens / counters.drafted_tokens == pytest.approx(0.5, abs=0.08)
