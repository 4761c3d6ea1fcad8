"""A decode step and prompt chunks in one CUDA graph, against a step and a forward of prompts."""

from pathlib import Path

import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.steps_with_prompts import Beside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "llama4"])
def test_one_graph_gives_what_two_give(family: str, tmp_path: Path) -> None:
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    together, apart = (
        Beside(
            tmp_path,
            capture=GraphCapture(),
            together=each,
            params=GREEDY,
            kernels=choose_kernels,
            dtype="bfloat16",
            device="cuda",
        )
        for each in (True, False)
    )
    assert together.logits.shape == (1, apart.logits.shape[1])
    torch.testing.assert_close(together.logits.float(), apart.logits.float(), rtol=0.05, atol=0.15)
    for mine, other in zip(together.kv(), apart.kv(), strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.05, atol=0.1)
