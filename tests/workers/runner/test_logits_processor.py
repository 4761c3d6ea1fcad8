"""Processed logits against a naive version and transformers' processors, on the torch and the Triton kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tandem.workers.kernels.base import LogitsKernels
from tandem.workers.kernels.torch.logits import TorchLogits
from tandem.workers.runner import logits_processor
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.runner.logits_processor import FEWEST_SLOTS, LogitsProcessor
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.naive_rules import processed, random_params

if TYPE_CHECKING:
    from transformers import LogitsProcessor as TheirProcessor

triton_logits = pytest.importorskip("tandem.workers.kernels.triton.logits")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 203
EOS = (3, 7)


@pytest.fixture(params=["torch", "triton"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LogitsProcessor:
    on_torch = request.param == "torch"
    kernels: LogitsKernels = TorchLogits() if on_torch else triton_logits.TritonLogits()
    monkeypatch.setattr(triton_logits, "BLOCK", 128)
    monkeypatch.setattr(logits_processor, "choose_logits_kernels", lambda device: kernels)
    return LogitsProcessor(torch.device("cpu") if on_torch else DEVICE)


class Rows:
    """Rows that are stepped with random logits, and random tokens after them."""

    def __init__(self, params: Sequence[SamplingParams | None], seed: int = 0) -> None:
        """None: a row without rules."""
        self._rng = np.random.default_rng(seed)
        self.params = params
        self.prompts = [self._rng.integers(0, VOCAB, 20).tolist() for _ in params]
        self.outputs: list[list[int]] = [
            self._rng.integers(0, VOCAB, 3 * row % 7).tolist() for row in range(len(params))
        ]
        self.rules = [self._rules_of(row) for row in range(len(params))]

    def _rules_of(self, row: int) -> LogitRules | None:
        params, prompt, output = self.params[row], self.prompts[row], self.outputs[row]
        if params is None:
            return None
        stops = frozenset(params.stop_token_ids)
        return LogitRules(params, stops, np.array(prompt + output), len(output), len(prompt))

    def step(self, processor: LogitsProcessor, dtype: torch.dtype = torch.float32) -> tuple[np.ndarray, np.ndarray]:
        """Processed logits, and what they should be."""
        logits = torch.from_numpy(self._rng.normal(0, 3, (len(self.params), VOCAB))).to(dtype)
        positions = np.array([len(p) + len(o) for p, o in zip(self.prompts, self.outputs, strict=True)])
        rules = SampleBatch.from_params([SamplingParams(temperature=0)] * len(self.params), self.rules).rules
        assert rules is not None
        device = processor._device
        actual = processor.process(logits.to(device), rules, positions)
        expected = [
            row if one is None else processed(row, one, self.prompts[index], self.outputs[index], one.stop_token_ids)
            for index, (row, one) in enumerate(zip(logits.float().numpy(), self.params, strict=True))
        ]
        tokens = self._rng.choice([*range(5, 40), *range(VOCAB)], len(self.params))
        processor.count(actual, torch.from_numpy(tokens).to(device))
        for output, token in zip(self.outputs, tokens.tolist(), strict=True):
            output.append(token)
        return actual.logits.cpu().numpy(), np.array(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_rules_step_by_step(processor: LogitsProcessor, dtype: torch.dtype) -> None:
    rows = Rows([None, *(random_params(seed, VOCAB, range(60)) for seed in range(FEWEST_SLOTS + 1)), None])
    for _ in range(4):
        actual, expected = rows.step(processor, dtype)
        np.testing.assert_array_equal(actual, expected)


def test_a_row_that_is_placed_again_goes_on_with_its_state(processor: LogitsProcessor) -> None:
    rows = Rows([random_params(seed, VOCAB, range(60)) for seed in range(4)])
    for _ in range(2):
        rows.step(processor)
    rows.rules = [rows._rules_of(row) for row in range(4)]
    for _ in range(2):
        actual, expected = rows.step(processor)
        np.testing.assert_array_equal(actual, expected)


def test_slots_are_used_again_when_rows_end(processor: LogitsProcessor) -> None:
    for seed in range(FEWEST_SLOTS + 2):
        rows = Rows([random_params(seed, VOCAB, range(60), presence_penalty=1.0)], seed)
        actual, expected = rows.step(processor)
        np.testing.assert_array_equal(actual, expected)
        del rows
    assert processor._tables is not None
    assert processor._tables.seen.shape[0] == FEWEST_SLOTS


def test_a_token_is_counted_no_further_than_a_count_holds(processor: LogitsProcessor) -> None:
    params = SamplingParams(frequency_penalty=1.0)
    context = np.array([5] + [9] * 40_000)
    for num_output, token in ((40_000, 9), (0, 5)):
        rules = np.array([LogitRules(params, frozenset(), context, num_output, 1)], np.object_)
        for expected in (-32767.0, -32767.0) if num_output else (0.0, -1.0):
            logits = torch.zeros(1, VOCAB, device=processor._device)
            one = processor.process(logits, rules, np.array([context.size]))
            assert one.logits[0, token].item() == expected
            processor.count(one, torch.tensor([token], device=processor._device))


def test_a_row_that_is_not_finite_counts_nothing(processor: LogitsProcessor) -> None:
    """All its tokens may be masked: then it has no token, and no state changes."""
    rows = Rows([random_params(seed, VOCAB, range(60), presence_penalty=1.0) for seed in range(3)])
    rows.step(processor)
    assert processor._tables is not None
    before = [table.clone() for table in vars(processor._tables).values()]
    device = processor._device
    rules, positions = np.array(rows.rules, np.object_), np.full(3, 30)
    processed = processor.process(torch.zeros(3, VOCAB, device=device), rules, positions)
    processor.count(processed, torch.full((3,), NOT_FINITE, device=device))
    assert all((old == new).all() for old, new in zip(before, vars(processor._tables).values(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_transformers_processors_give_the_same(processor: LogitsProcessor, seed: int) -> None:
    from transformers import (
        LogitsProcessorList,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    params = random_params(seed, VOCAB, range(60), presence_penalty=0.0, frequency_penalty=0.0)
    # Theirs looks for words in the prompt, too.
    params = replace(params, bad_words_ids=tuple((word[-1],) for word in params.bad_words_ids))
    rows = Rows([params], seed)
    prompt, output = rows.prompts[0], rows.outputs[0]
    theirs: list[TheirProcessor] = []
    if params.allowed_token_ids:
        theirs.append(PrefixConstrainedLogitsProcessor(lambda row, ids: list(params.allowed_token_ids), 1))
    if params.bad_words_ids:
        theirs.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids]))
    if params.min_tokens:
        stops = list(params.stop_token_ids)
        theirs.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops))
    if params.logit_bias:
        theirs.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    theirs.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = LogitsProcessorList(theirs)(torch.tensor([prompt + output]), logits.clone())  # type: ignore[arg-type]
    if not params.changes_logits:
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
        return
    rules = np.array(rows.rules, np.object_)
    actual = processor.process(logits.to(processor._device), rules, np.array([len(prompt) + len(output)]))
    torch.testing.assert_close(actual.logits.cpu(), expected, rtol=0, atol=0)


def test_samples_are_distributed_as_the_processed_logits_say() -> None:
    params = SamplingParams(presence_penalty=1.5, repetition_penalty=1.3, logit_bias=((4, 2.0), (5, -3.0)), seed=0)
    prompt, output, draws = [1, 2, 3], [2, 6, 6], 3_000
    logits = np.random.default_rng(0).normal(0, 1, 12).astype(np.float32)
    rules = LogitRules(params, frozenset(), np.array(prompt + output), len(output), len(prompt))
    batch = SampleBatch.from_params([replace(params, seed=seed) for seed in range(draws)], [rules] * draws)
    sampler = EagerSampler(torch.device("cpu"))
    tokens = sampler.sample(torch.from_numpy(logits).repeat(draws, 1), batch, np.full(draws, 6)).wait().token_ids
    weights = np.exp(processed(logits, params, prompt, output, ()).astype(np.float64))
    expected = weights / weights.sum()
    observed = np.bincount(tokens, minlength=12) / draws
    assert np.abs(observed - expected).max() < 5 * (0.25 / draws) ** 0.5
