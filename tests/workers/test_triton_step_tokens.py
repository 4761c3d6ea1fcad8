"""Token ids of a captured step against torch's: on a GPU, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tandem.workers.kernels import triton_step_tokens
from tandem.workers.kernels.torch_step_tokens import TorchStepTokens
from tandem.workers.kernels.triton_step_tokens import TritonStepTokens
from tandem.workers.posted_samples import TOKEN_BITS

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
    tickets = torch.tensor([7 << TOKEN_BITS, 7 << TOKEN_BITS, 2**38 << TOKEN_BITS, 1 << TOKEN_BITS, 6 << TOKEN_BITS, 0])
    last, expected = torch.full((8,), -7, device=DEVICE), torch.full((8,), -7)
    words, expected_words = (torch.full((2, 7), -3, pin_memory=DEVICE == "cuda") for _ in range(2))
    TritonStepTokens().keep_best(logits, last[:6], tickets.to(DEVICE), words)
    TorchStepTokens().keep_best(logits.cpu(), expected[:6], tickets, expected_words)
    assert last.tolist() == expected.tolist()
    assert last[:5].tolist() == [202, 0, 6, 0, 150]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert words.tolist() == expected_words.tolist()
    posted = (tickets[:5] + last[:5].cpu()).tolist()
    assert words.tolist() == [[-3, -3, posted[2], -3, posted[4], -3, -3], [*posted[:2], -3, posted[3], -3, -3, -3]]
