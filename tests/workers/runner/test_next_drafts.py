"""Verify steps that follow one another before they are read, against plain steps."""

from pathlib import Path

import pytest

from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.draft_chains import MAX_NGRAM, Chain
from tests.support.prompt_programs import PromptRunner, RunInOnePlace


def captured(folder: Path) -> PromptRunner:
    runner = PromptRunner(folder, None, TableKernels)
    runner.runner.capture_verification(16, runner.counting(RunInOnePlace()), MAX_NGRAM)
    return runner


@pytest.mark.gate("qwen3-0.3")
@pytest.mark.parametrize("temperature", [0, 0.3])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_followers_give_the_tokens_of_plain_steps(family: str, temperature: float, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    accepted = drafted = 0
    for seed in range(4):
        plain = Chain(PromptRunner(folder, None, TableKernels), seed, temperature=temperature)
        chain = Chain(captured(folder), seed, temperature=temperature)
        for ours, theirs in zip(chain.run(), plain.plain(), strict=True):
            shared = min(len(ours), len(theirs))
            assert ours[:shared] == theirs[:shared]
        accepted, drafted = accepted + chain.accepted, drafted + chain.drafted
        assert chain.runner.replays > 0
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", ["gemma3", "llama4", "gpt_oss"])
def test_where_pages_leave_a_window_nothing_follows(family: str, tmp_path: Path) -> None:
    assert captured(save_checkpoint(family, tmp_path)).runner.next_drafts is None
