"""Prompt lookup drafts what transformers' does."""

import random

import numpy as np
import pytest
import torch

from tandem.workers.speculation.ngram import look_up


@pytest.mark.parametrize("seed", range(40))
def test_drafts_equal_those_of_transformers(seed: int) -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    draws = random.Random(seed)
    max_ngram, most = draws.randrange(1, 5), draws.randrange(1, 6)
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=most, max_matching_ngram_size=max_ngram, max_length=1 << 20, vocab_size=9
    )
    for _ in range(30):
        context = np.array([draws.randrange(draws.choice([2, 8])) for _ in range(draws.randrange(2, 40))])
        given, _ = theirs.get_candidates(torch.from_numpy(context)[None])  # type: ignore[arg-type]
        assert look_up(context, max_ngram, most).tolist() == given[0, context.size :].tolist()


def test_what_cannot_have_stood_before() -> None:
    for context in ([3], [1, 2, 3]):
        assert look_up(np.array(context), 3, 4).size == 0
    assert look_up(np.array([1, 1]), 3, 0).size == 0
