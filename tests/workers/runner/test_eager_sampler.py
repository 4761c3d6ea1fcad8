"""Draws without a graph: many rows, several under way, log-probabilities beside them."""

import numpy as np
import torch

from tandem.workers.runner.eager_sampler import FEWEST_ROWS, EagerSampler
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 40


def greedy(sampler: EagerSampler, tokens: list[int], logprobs: int | None = None) -> PendingSamples:
    """Samples rows whose best tokens are these."""
    logits = torch.eye(VOCAB)[tokens].to(DEVICE)
    batch = SampleBatch.from_params([SamplingParams(temperature=0, logprobs=logprobs)] * len(tokens))
    return sampler.sample(logits, batch, np.zeros(len(tokens), np.int64))


def test_rows_for_which_there_was_no_room() -> None:
    sampler, few = EagerSampler(DEVICE), [7, 9]
    before = greedy(sampler, few)
    many = [row % VOCAB for row in range(5 * FEWEST_ROWS)]
    assert greedy(sampler, many).wait().token_ids.tolist() == many
    assert greedy(sampler, few).wait().token_ids.tolist() == few
    assert before.wait().token_ids.tolist() == few


def test_room_that_a_forward_has_made_serves_what_is_no_forward() -> None:
    sampler, many = EagerSampler(DEVICE), [row % VOCAB for row in range(2 * FEWEST_ROWS)]
    with torch.inference_mode():
        assert greedy(sampler, many).wait().token_ids.tolist() == many
    assert greedy(sampler, [7, 9]).wait().token_ids.tolist() == [7, 9]


def test_what_is_under_way_keeps_what_it_is_drawn_with() -> None:
    """The third draw waits until nobody reads the first one's arrays."""
    sampler = EagerSampler(DEVICE)
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    params = [SamplingParams(seed=seed) for seed in range(12)]
    alone = [sampler.sample(logits, SampleBatch.from_params([one]), np.ones(1, np.int64)).wait() for one in params]
    at_once = [sampler.sample(logits, SampleBatch.from_params([one]), np.ones(1, np.int64)) for one in params]
    tokens = [pending.wait().token_ids.item() for pending in at_once]
    assert tokens == [samples.token_ids.item() for samples in alone]
    assert len(set(tokens)) > 1


def test_log_probabilities_go_with_the_tokens() -> None:
    sampler = EagerSampler(DEVICE)
    pending = [greedy(sampler, tokens, logprobs=1) for tokens in ([3, 8], [5], [6])]
    for samples, tokens in zip([one.wait() for one in pending], ([3, 8], [5], [6]), strict=True):
        assert samples.token_ids.tolist() == tokens
        assert [one.top[0][0] for one in samples.logprobs if one is not None] == tokens
