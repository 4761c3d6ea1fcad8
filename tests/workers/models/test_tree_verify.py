"""Verifying drafts: logits of a token tree are transformers' of each path, and a commit goes on from there."""

from pathlib import Path
from random import Random

import pytest
import torch

from tests.support.cached_model import CachedModel
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import load_oracle, random_prompt

FLOAT32 = 1e-4  # relative and absolute
NODES, ROUNDS = 12, 3


@pytest.mark.parametrize(
    "case", ["llama", "mistral-window", "gemma2", "gemma3", "gpt_oss", "qwen2-window", "deepseek_v32"]
)
@torch.inference_mode()
def test_logits_of_a_tree_are_those_of_its_paths(case: str, tmp_path: Path) -> None:
    """Texts that outgrow the windows of 24 tokens, chains and bushes beside a sequence that decodes."""
    save_checkpoint(case, tmp_path)
    oracle, model, random = load_oracle(tmp_path), CachedModel(tmp_path, "float32"), Random(0)
    text, other = random_prompt(20, seed=1), random_prompt(5, seed=2)
    for sequence in (0, 1):
        model.cache.add_sequence(sequence)
    model.step({0: text, 1: other})
    for step in range(ROUNDS):
        drafts = random_prompt(NODES, seed=10 + step)
        parents = [random.randint(max(-1, node - random.choice([1, 4])), node - 1) for node in range(NODES)]
        logits = model.step({1: [7], 0: drafts}, all_rows=True, parents=[None, parents])
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
        for leaf in set(range(NODES)) - set(parents):
            whole = text + [drafts[node] for node in paths[leaf]]
            expected = oracle(torch.tensor([whole])).logits[0, len(text) :]
            ours = logits[[1 + node for node in paths[leaf]]]
            torch.testing.assert_close(ours, expected, rtol=FLOAT32, atol=FLOAT32)
        leaf = random.randrange(NODES)
        model.cache.commit_token_tree([0], [leaf])
        text = text + [drafts[node] for node in paths[leaf]]
    expected = oracle(torch.tensor([[*text, 9]])).logits[0, -1:]
    torch.testing.assert_close(model.step({0: [9]}), expected, rtol=FLOAT32, atol=FLOAT32)
