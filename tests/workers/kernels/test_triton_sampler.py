"""Token ids of a captured step against torch's: on a GPU, else in Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tandem.workers.kernels.torch.sampler import TorchSampler
from tandem.workers.kernels.triton import sampler as triton_sampler
from tandem.workers.kernels.triton.sampler import TritonSampler
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.step_inputs import pack_sampling, unpack_sampling
from tandem.workers.sampling.posted_samples import NOT_FINITE, TOKEN_BITS
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0)


def test_inputs_come_from_the_host_or_from_the_last_step() -> None:
    tokens, last = torch.arange(100, 105, device=DEVICE), torch.arange(200, 208, device=DEVICE)
    last[3] = NOT_FINITE  # no embedding has a row for it
    sources = torch.tensor([-1, 7, 0, -1, 3], device=DEVICE)
    actual = TritonSampler(8, torch.device(DEVICE)).inputs(tokens, sources, last)
    assert actual.tolist() == TorchSampler().inputs(tokens, sources, last).tolist() == [100, 207, 200, 103, 0]


@pytest.mark.parametrize("programs", [1, 12, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_first_of_the_best_tokens_is_kept(
    dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has one program, two, or one a block."""
    monkeypatch.setattr(triton_sampler, "BLOCK", 64)
    monkeypatch.setattr(triton_sampler, "MAX_PROGRAMS", programs)
    logits = torch.randint(-20, 20, (6, 203), generator=torch.Generator().manual_seed(3)).to(dtype)  # with equals
    logits[0, 202] = logits[1, 0] = logits[2, [70, 134, 6]] = 30  # at both ends; in one lane and in two
    logits[3] = -torch.inf
    logits[4, 150] = torch.inf
    logits[5] = -logits[5].abs() - 1
    logits[5, [13, 200]] = torch.tensor([-0.0, 0.0]).to(dtype)
    tickets = torch.tensor([turn << TOKEN_BITS for turn in (7, 7, 2**38, 1, 6, 0)])
    kept, words = sample_by_both(logits, [GREEDY] * 6, tickets)
    assert kept == [202, 0, 6, NOT_FINITE, NOT_FINITE, 13]
    posted = [int(ticket) | token for ticket, token in zip(tickets[:5], kept, strict=False)]
    assert words == [[-3, -3, posted[2], -3, posted[4], -3, -3], [*posted[:2], -3, posted[3], -3, -3, -3]]


def test_rows_are_drawn_beside_rows_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples equal those without graphs. Rows after those of a narrower step are unused."""
    monkeypatch.setattr(triton_sampler, "BLOCK", 64)
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 64)
    logits = torch.randn(7, 203, generator=torch.Generator().manual_seed(5))
    options: list[dict[str, Any]] = [
        {"temperature": 0.7}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8}, {"temperature": 9e-6},
    ]  # fmt: skip
    params = [SamplingParams(**one, seed=row) for row, one in enumerate(options)]
    kept, words = sample_by_both(logits, params, torch.arange(2, 9) << TOKEN_BITS)
    expected = EagerSampler(torch.device("cpu")).sample(logits, SampleBatch.from_params(params), np.arange(7)).wait()
    assert kept == expected.token_ids.tolist() != logits.argmax(-1).tolist()
    assert kept[1] == logits[1].argmax()
    assert [words[row % 2][row] & (1 << TOKEN_BITS) - 1 for row in range(7)] == kept


def sample_by_both(
    logits: torch.Tensor, params: list[SamplingParams], tickets: torch.Tensor
) -> tuple[list[int], list[list[int]]]:
    """The tokens and words that both backends keep; positions are the rows' numbers."""
    rows, results = logits.shape[0], []
    inputs = pack_sampling(0, SampleBatch.from_params(params), np.arange(rows))
    in_triton = TritonSampler(rows, torch.device(DEVICE))
    for sampler, device in (
        (TorchSampler(), "cpu"),
        (in_triton, DEVICE),
        (in_triton, DEVICE),
    ):  # again: is it reset?
        _, sampling = unpack_sampling([torch.from_numpy(array).to(device) for array in inputs])
        last = torch.full((rows + 2,), -7, device=device)
        words = torch.full((2, 7), -3, pin_memory=device == "cuda")
        for step in (5 - logits, logits):  # nothing is left of a step before
            sampler.sample(step.to(device), sampling, last[:rows], tickets.to(device), words)
        assert last[rows:].tolist() == [-7, -7]
        if device == "cuda":
            torch.cuda.synchronize()
        results.append((last[:rows].tolist(), words.tolist()))
    assert results[0] == results[1]
    return results[0]
