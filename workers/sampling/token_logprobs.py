"""The log-probabilities of one output token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.workers.sampling.random import Logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms, of the raw distribution; top holds (token id, log-probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def split_logprobs(logprobs: Logprobs | None, token_ids: NDArray[np.int64]) -> list[TokenLogprobs | None]:
    """One entry for each of token_ids (int64 [n]), None where the row did not ask; logprobs on the host."""
    entries: list[TokenLogprobs | None] = [None] * token_ids.size
    if logprobs is None:
        return entries
    for index, row in enumerate(logprobs.rows.tolist()):
        count = int(logprobs.counts[index])
        top = zip(logprobs.top_ids[index, :count].tolist(), logprobs.top_logprobs[index, :count].tolist(), strict=True)
        entries[row] = TokenLogprobs(int(token_ids[row]), float(logprobs.chosen[index]), tuple(top))
    return entries
