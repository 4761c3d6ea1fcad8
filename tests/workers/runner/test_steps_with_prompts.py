"""A decode step and prompt chunks in one forward give what a step and a forward of prompts give apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.workers.runner.forward_graphs import Capture
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.prompt_programs import RunInOnePlace
from tests.support.steps_with_prompts import DRAWN, Beside

FAMILIES = ["qwen3", "gemma4", "gpt_oss", "qwen3_moe", "llama4"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("capture", [None, RunInOnePlace], ids=["eager", "in graphs"])
def test_one_forward_gives_what_two_give(
    folder: Path, capture: Callable[[], Capture] | None, params: SamplingParams
) -> None:
    """The logits after prompts are read when further graphs have run, which write where they were."""
    together, apart = (
        Beside(folder, capture=capture and capture(), together=each, params=params, kernels=TableKernels)
        for each in (True, False)
    )
    assert together.runner.overlaps is (capture is not None)
    assert [one.token_ids.tolist() for one in together.samples] == [one.token_ids.tolist() for one in apart.samples]
    assert together.logits.shape == (1, apart.logits.shape[1])
    torch.testing.assert_close(together.logits, apart.logits, rtol=1e-4, atol=1e-4)
    for mine, other in zip(together.kv(), apart.kv(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
