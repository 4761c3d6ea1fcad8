"""Draws by the kernel against torch's: on a GPU, else in Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams

pytest.importorskip("triton")

from tandem.workers.kernels.triton import sampler as triton_sampler
from tandem.workers.kernels.triton.sampler import TritonSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 200
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.7, "min_p": 1.0},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.95},
]


def drawn(logits: torch.Tensor, params: list[SamplingParams], device: str = "cpu") -> list[int]:
    """Samples with torch's operations, if choose_sampler() is unchanged, as on a CPU."""
    batch, positions = SampleBatch.from_params(params), np.arange(len(params))
    return EagerSampler(torch.device(device)).sample(logits.to(device), batch, positions).wait().token_ids.tolist()


def both(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    """Returns the samples of the torch operations and of the kernel."""
    expected = drawn(logits, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.workers.runner.eager_sampler.choose_sampler", TritonSampler)
        return expected, drawn(logits, params, DEVICE)


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("seed", "block"), [(0, 512), (1, 128)])
def test_draws_equal_those_of_torch(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", block)
    params = [SamplingParams(**options, seed=10 * seed + row) for row, options in enumerate(PARAMS)]
    params[4] = SamplingParams(temperature=0)
    expected, actual = both(random_logits(len(params), seed), params)
    assert actual == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("tokens", "programs"), [(slice(None), 128), (slice(170, 172), 1)])
def test_rows_that_are_not_finite_get_no_token(
    bad: float, tokens: slice, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad logits stand anywhere. Negative infinity is only bad where no token is possible."""
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 128)
    monkeypatch.setattr(triton_sampler, "BLOCK", 64)
    monkeypatch.setattr(triton_sampler, "MAX_PROGRAMS", programs)
    options: list[dict[str, Any]] = [*PARAMS, {"temperature": 0}, {"temperature": 0}]  # one good, one bad
    params = [SamplingParams(**one, seed=row) for row, one in enumerate(options)]
    logits = random_logits(len(params), seed=3)
    good = drawn(logits, params)
    logits[1::2, tokens] = bad
    expected, actual = both(logits, params)
    assert actual == expected
    assert actual[::2] == good[::2]
    assert {token == NOT_FINITE for token in actual[1::2]} == {bad != -torch.inf or tokens == slice(None)}


def test_logits_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 128)
    params = [SamplingParams(**options, seed=row) for row, options in enumerate(PARAMS[5:])]
    expected, actual = both(random_logits(len(params), seed=2).half(), params)
    assert actual == expected


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.999}])
def test_equals_and_impossible_tokens(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 32)
    row = torch.tensor([-torch.inf, 1.0, 3.0, 1.0, 1.0, -torch.inf, -0.0, 0.0, -2.0] + [-torch.inf] * 20)
    params = [SamplingParams(**options, temperature=4.0, seed=seed) for seed in range(4)]
    expected, actual = both(row.repeat(4, 1), params)
    assert actual == expected


def test_more_equals_than_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 32)
    row = torch.cat((torch.zeros(20), torch.ones(90), -torch.ones(10)))
    expected, actual = both(row.repeat(3, 1), [SamplingParams(top_k=20, seed=seed) for seed in range(3)])
    assert actual == expected


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_extreme_draws(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tandem.workers.runner.step_inputs.uniform", lambda seeds, positions: np.full(seeds.size, number)
    )
    monkeypatch.setattr(triton_sampler, "SAMPLE_BLOCK", 64)
    params = [SamplingParams(seed=0, top_p=top_p) for top_p in (1.0, 0.9, 0.3)]
    expected, actual = both(random_logits(3, seed=5), params)
    assert actual == expected


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_real_vocabulary() -> None:
    params = [SamplingParams(**options, seed=row) for row, options in enumerate(PARAMS * 20)]
    expected, actual = both(random_logits(len(params), 9, vocab=151_936), params)
    assert np.mean(np.array(expected) == np.array(actual)) > 0.99  # sums are rounded otherwise
