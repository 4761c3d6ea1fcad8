"""Draws against a naive row-by-row reference, and what they promise: to depend on (seed, position) alone."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.pending_samples import Samples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.random import uniform
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.sampling.token_logprobs import TokenLogprobs

VOCAB = 50


def naive_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [vocab], filtered in vLLM's way: min_p, then top_k and top_p on ascending logits."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = softmax(scaled)
    scaled = np.where(probabilities < params.min_p * probabilities.max(), -np.inf, scaled)
    if params.top_k > 0:
        scaled = np.where(scaled < np.sort(scaled)[-min(params.top_k, len(scaled))], -np.inf, scaled)
    if params.top_p < 1:
        ascending = np.argsort(scaled, kind="stable")
        dropped = np.cumsum(softmax(scaled)[ascending]) <= 1 - params.top_p
        dropped[-1] = False
        scaled[ascending[dropped]] = -np.inf
    return softmax(scaled)


def transformers_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [vocab], as transformers' processors filter in that order."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature), MinPLogitsWarper(params.min_p)])
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    ids, scores = torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits.astype(np.float64))[None]
    filtered: Any = chain(cast(Any, ids), cast(Any, scores))
    return filtered[0].softmax(-1).numpy()


def softmax(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max())
    return exponents / exponents.sum()


def naive_token(logits: np.ndarray, params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    probabilities = naive_probabilities(logits, params)
    draw = uniform(np.array([params.seed], np.uint64), np.array([position]))[0]
    return int(np.searchsorted(np.cumsum(probabilities), draw, side="right"))


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> Samples:
    sampler = EagerSampler(torch.device("cpu"))
    return sampler.sample(logits, SampleBatch.from_params(params), np.array(positions)).wait()


def sample(logits: np.ndarray, params: list[SamplingParams], positions: list[int]) -> list[int]:
    return draw(torch.from_numpy(logits), params, positions).token_ids.tolist()


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, -1, 1, 2, 10, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    """Probabilities and log-probabilities of 16 bits would be off by a hundredth."""
    params = [SamplingParams(top_p=0.9, seed=row, logprobs=2) for row in range(20)]
    narrow, positions = torch.randn(20, VOCAB).to(dtype), list(range(20))
    drawn, expected = (draw(logits, params, positions) for logits in (narrow, narrow.float()))
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.logprobs == expected.logprobs


@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 2**32), st.integers(0, 100_000))
def test_equals_the_naive_reference(params: list[SamplingParams], seed: int, position: int) -> None:
    logits = random_logits(len(params), seed)
    positions = [position + row for row in range(len(params))]
    expected = [naive_token(logits[row], one, positions[row]) for row, one in enumerate(params)]
    assert sample(logits, params, positions) == expected


@given(PARAMS.filter(lambda params: params.temperature > 0), st.integers(0, 2**32))
def test_the_reference_equals_transformers(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed)[0]
    expected = transformers_probabilities(logits, params)
    assert naive_probabilities(logits, params) == pytest.approx(expected, abs=1e-12)


@given(st.lists(PARAMS, min_size=2, max_size=8))
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(params: list[SamplingParams]) -> None:
    logits = random_logits(len(params))
    positions = list(range(len(params)))
    alone = [sample(logits[[row]], [params[row]], [row])[0] for row in positions]
    assert sample(logits, params, positions) == alone
    assert sample(logits[::-1].copy(), params[::-1], positions[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.7, "min_p": 0.01}],
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    """The distribution equals transformers': chi-square over the tokens, fixed seeds, with the bound of a
    significance of 1e-6."""
    draws, vocab = 20_000, 12
    params = SamplingParams(seed=7, **options)
    logits = random_logits(1, seed=5, vocab=vocab)
    tokens = sample(np.repeat(logits, draws, 0), [params] * draws, list(range(draws)))
    expected = transformers_probabilities(logits[0], params) * draws
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any()
    kept = expected > 0
    degrees = kept.sum() - 1
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < degrees + 5 * np.sqrt(2 * degrees) + 15


def test_uniform_numbers_are_even_and_unlike_for_neighbours() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    numbers = uniform(seeds.ravel(), positions.ravel())
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    assert np.abs(np.histogram(numbers, 50, (0, 1))[0] - 1800).max() < 6 * np.sqrt(1800)
    grid = numbers.reshape(300, 300)
    for first, second in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def test_uniform_numbers_stay_what_they_are() -> None:
    """A replayed request draws the same numbers, also after an upgrade."""
    seeds = np.array([0, 1, 2**64 - 1], np.uint64)
    numbers = uniform(seeds, np.array([0, 5, 131_071]))
    assert numbers.tolist() == [0.6524484863740322, 0.7743991716672016, 0.8258740021392166]


def test_ties_at_the_kth_place_all_stay() -> None:
    logits = np.array([[3.0, 1.0, 1.0, 1.0, -2.0]], np.float32).repeat(500, 0)
    params = [SamplingParams(top_k=2, temperature=10.0, seed=seed) for seed in range(500)]
    assert set(sample(logits, params, [0] * 500)) == {0, 1, 2, 3}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    """The extreme draws, 0 and just below 1, with impossible tokens at both ends."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    seeds = [SamplingParams(seed=seed) for seed in (0, 1)]
    for params in (seeds, [SamplingParams(seed=one.seed, top_p=0.999) for one in seeds]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tandem.workers.runner.step_inputs.uniform", lambda seeds, positions: np.array([0.0, 1 - 2.0**-53])
            )
            assert draw(logits, params, [0, 0]).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_row_that_is_not_finite_gets_no_token(bad: float, options: dict[str, Any], logprobs: int | None) -> None:
    """The others of its batch get theirs."""
    logits = random_logits(3)
    params = [SamplingParams(seed=row, logprobs=logprobs, **options) for row in range(3)]
    expected = sample(logits, params, [0] * 3)
    logits[1] = bad
    assert sample(logits, params, [0] * 3) == [expected[0], NOT_FINITE, expected[2]]
    logits[1] = random_logits(1, seed=9)
    logits[1, 17] = bad
    assert (sample(logits, params, [0] * 3)[1] == NOT_FINITE) == (bad != -np.inf)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.from_numpy(random_logits(4))
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(temperature=0.1, seed=2, logprobs=0),
        SamplingParams(top_k=2, seed=3, logprobs=5),
    ]
    samples = draw(logits, params, list(range(4)))
    raw = logits.log_softmax(-1).numpy()
    for row, one in enumerate(params):
        logprobs = samples.logprobs[row]
        if one.logprobs is None:
            assert logprobs is None
            continue
        token = int(samples.token_ids[row])
        best = np.argsort(-raw[row])[: one.logprobs].tolist()
        assert logprobs == TokenLogprobs(token, float(raw[row, token]), tuple((id, float(raw[row, id])) for id in best))


def test_no_logprobs_unless_asked() -> None:
    logits = torch.from_numpy(random_logits(1))
    assert draw(logits, [SamplingParams(temperature=0)], [0]).logprobs == [None]


def test_a_seed_is_required_where_it_matters() -> None:
    SampleBatch.from_params([SamplingParams(temperature=0)])
    with pytest.raises(ValueError, match="seed of row 0 is None; it must be drawn before"):
        SampleBatch.from_params([SamplingParams()])


def test_take_picks_rows_of_every_array() -> None:
    other = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=11, logprobs=2)
    batch = SampleBatch.from_params([SamplingParams(temperature=0), other])
    picked, alone = batch.take(np.array([1])), SampleBatch.from_params([other])
    for name in ("seeds", "columns", "num_logprobs"):
        assert getattr(picked, name).tolist() == getattr(alone, name).tolist()
