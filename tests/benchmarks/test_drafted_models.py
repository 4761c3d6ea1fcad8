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
from tests.benchmarks.mtp import AIR, TINY

ROOT = Path(__file__).resolve().parents[2]


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
    """Of 3 tokens, each of which holds with 0.7 where the one before does, (0.7 + 0.49 + 0.34) / 3 are accepted."""
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
