"""T5Gemma on a GPU: eager forwards and CUDA graphs of steps and verification."""

from pathlib import Path

import pytest
import torch

from tandem.workers.runner.forward_graphs import GraphCapture
from tests.support.encoder_models import START, EncoderRunner, save_t5gemma
from tests.support.oracle import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

SIZES = {"head_dim": 64, "hidden_size": 256}
PROMPTS = [(random_prompt(70, 1), [START, *random_prompt(40, 2)]), (random_prompt(16, 3), [START])]


def test_logits_in_16_bits_are_near_those_of_a_cpu(tmp_path: Path) -> None:
    save_t5gemma(tmp_path, SIZES, SIZES)
    expected = EncoderRunner(tmp_path).prefill(PROMPTS)
    found = EncoderRunner(tmp_path, dtype="bfloat16", device="cuda").prefill(PROMPTS, chunk=20)
    error, scale = (found.cpu().float() - expected).abs().mean(), expected.abs().mean()
    assert error < 0.05 * scale


def test_graphs_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    save_t5gemma(tmp_path, SIZES, SIZES)
    eager, captured = (
        EncoderRunner(tmp_path, dtype="bfloat16", device="cuda", capture=capture) for capture in (None, GraphCapture())
    )
    first = eager.prefill(PROMPTS).argmax(1).tolist()
    assert captured.prefill(PROMPTS).argmax(1).tolist() == first
    steps = eager.steps(first, 6)
    assert captured.steps(first, 6) == steps
    torch.cuda.synchronize()
    drafts = [[tokens[-1], 5, 9] for tokens in steps]
    assert captured.verify(drafts) == eager.verify(drafts)
