"""Draws without a graph: many rows, several under way, log-probabilities beside them."""

import numpy as np
import torch

from tandem.workers.runner.posted_draws import FEWEST_ROWS, PostedDraws
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 40


def greedy(draws: PostedDraws, tokens: list[int], logprobs: int | None = None) -> PendingSamples:
    """Of rows whose best tokens are these."""
    logits = torch.eye(VOCAB)[tokens].to(DEVICE)
    batch = SampleBatch.from_params([SamplingParams(temperature=0, logprobs=logprobs)] * len(tokens))
    return draws.draw(logits, batch, np.zeros(len(tokens), np.int64))


def test_rows_for_which_there_was_no_room() -> None:
    draws, few = PostedDraws(DEVICE), [7, 9]
    before = greedy(draws, few)
    many = [row % VOCAB for row in range(5 * FEWEST_ROWS)]
    assert greedy(draws, many).wait().token_ids.tolist() == many
    assert greedy(draws, few).wait().token_ids.tolist() == few
    assert before.wait().token_ids.tolist() == few


def test_what_is_under_way_keeps_what_it_is_drawn_with() -> None:
    """The third draw waits until nobody reads the first one's arrays."""
    draws = PostedDraws(DEVICE)
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    params = [SamplingParams(seed=seed) for seed in range(12)]
    alone = [draws.draw(logits, SampleBatch.from_params([one]), np.ones(1, np.int64)).wait() for one in params]
    at_once = [draws.draw(logits, SampleBatch.from_params([one]), np.ones(1, np.int64)) for one in params]
    tokens = [pending.wait().token_ids.item() for pending in at_once]
    assert tokens == [samples.token_ids.item() for samples in alone]
    assert len(set(tokens)) > 1


def test_log_probabilities_go_with_the_tokens() -> None:
    draws = PostedDraws(DEVICE)
    pending = [greedy(draws, tokens, logprobs=1) for tokens in ([3, 8], [5], [6])]
    for samples, tokens in zip([one.wait() for one in pending], ([3, 8], [5], [6]), strict=True):
        assert samples.token_ids.tolist() == tokens
        assert [one.top[0][0] for one in samples.logprobs if one is not None] == tokens
