"""Token ids of a captured step against torch's: on a GPU, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tandem.workers.kernels import triton_step_tokens
from tandem.workers.kernels.torch_step_tokens import TorchStepTokens
from tandem.workers.kernels.triton_step_tokens import TritonStepTokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_inputs_come_from_the_host_or_from_the_last_step() -> None:
    tokens, last = torch.arange(100, 105, device=DEVICE), torch.arange(200, 208, device=DEVICE)
    sources = torch.tensor([-1, 7, 0, -1, 3], device=DEVICE)
    actual = TritonStepTokens().inputs(tokens, sources, last)
    assert actual.tolist() == TorchStepTokens().inputs(tokens, sources, last).tolist() == [100, 207, 200, 103, 203]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_first_of_the_best_tokens_is_kept(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_step_tokens, "BLOCK", 64)
    logits = torch.randint(-20, 20, (6, 203), generator=torch.Generator().manual_seed(3)).to(dtype)  # with equals
    logits[0, 202] = logits[1, 0] = logits[2, [70, 134, 6]] = 30  # at both ends; in one lane and in two
    logits[3] = -torch.inf
    logits[4, 150] = torch.inf
    logits = logits.to(DEVICE)
    last, expected = (torch.full((8,), -7, device=DEVICE) for _ in range(2))
    TritonStepTokens().keep_best(logits, last[:6])
    TorchStepTokens().keep_best(logits, expected[:6])
    assert last.tolist() == expected.tolist()
    assert last[:5].tolist() == [202, 0, 6, 0, 150]
