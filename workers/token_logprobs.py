"""The log-probabilities of one output token."""

from dataclasses import dataclass

from tandem.workers.sampling import Logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms, of the raw distribution; top holds (token id, log-probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def split_logprobs(logprobs: Logprobs | None, token_ids: list[int]) -> list[TokenLogprobs | None]:
    """One entry for each of token_ids, None where the row did not ask; logprobs on the host."""
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    if logprobs is None:
        return entries
    for index, row in enumerate(logprobs.rows.tolist()):
        count = int(logprobs.counts[index])
        top = zip(logprobs.top_ids[index, :count].tolist(), logprobs.top_logprobs[index, :count].tolist(), strict=True)
        entries[row] = TokenLogprobs(token_ids[row], float(logprobs.chosen[index]), tuple(top))
    return entries
