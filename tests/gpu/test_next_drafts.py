"""Verify steps in CUDA graphs that follow one another before they are read, against those that are read first."""

from pathlib import Path

import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.runner.forward_graphs import GraphCapture
from tests.support.checkpoints import make_model
from tests.support.draft_chains import MAX_NGRAM, Chain
from tests.support.prompt_programs import PromptRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
SCALES = KVScales(((0.01,), (0.02, 0.015)), ((0.02,), (0.01, 0.03)))
SIZES = {"head_dim": 128, "hidden_size": 256}
CASES = {
    "bfloat16": ("qwen3", "bfloat16", SIZES, None),
    "experts": ("qwen3_moe", "bfloat16", SIZES, None),
    "entries of 8 bits": ("qwen3", "bfloat16", SIZES, SCALES),
}


def captured(folder: Path, dtype: str, scales: KVScales | None) -> PromptRunner:
    runner = PromptRunner(folder, None, choose_kernels, dtype=dtype, device="cuda", scales=scales)
    runner.runner.capture_verification(16, runner.counting(GraphCapture()), MAX_NGRAM)
    return runner


@pytest.mark.parametrize("temperature", [0, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_followers_give_the_same_tokens(case: str, temperature: float, tmp_path: Path) -> None:
    family, dtype, sizes, scales = CASES[case]
    make_model(family, **sizes).save_pretrained(tmp_path)
    accepted = drafted = 0
    for seed in range(3):
        both = [Chain(captured(tmp_path, dtype, scales), seed, temperature=temperature) for _ in range(2)]
        ours, theirs = both[0].run(), both[1].run(follows=False)
        assert ours == theirs
        assert both[0].runner.replays == both[1].runner.replays > 0
        accepted, drafted = accepted + both[0].accepted, drafted + both[0].drafted
    assert 0 < accepted < drafted
