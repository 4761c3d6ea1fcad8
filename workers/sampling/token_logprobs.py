"""The log-probabilities of output tokens, on their way from the logits to clients."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.workers.sampling.sample_batch import NO_LOGPROBS


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms, of the raw distribution; top holds (token id, log-probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of the m rows that asked for them, from the raw logits (before temperature and filters).

    The tensors are on the logits' device.
    """

    rows: NDArray[np.int64]  # [m], of the batch
    chosen: Tensor  # float32 [m]
    counts: NDArray[np.int64]  # [m]: how many of its best tokens each row asked for
    top_ids: Tensor  # int64 [m, largest count], best first
    top_logprobs: Tensor  # float32, as top_ids


def logprobs_of(logits: Tensor, tokens: Tensor, num_logprobs: NDArray[np.int64]) -> Logprobs | None:
    """Returns the log-probabilities of tokens int64 [n] under logits [n, vocab]; None where no row asks."""
    rows = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    if rows.size == 0:
        return None
    (where,) = upload([rows], logits.device)
    values = logits[where].float().log_softmax(dim=-1)
    counts = np.minimum(num_logprobs[rows], logits.shape[-1])
    top, ids = values.topk(int(counts.max()), dim=-1)
    inside = tokens[where].clamp(max=logits.shape[-1] - 1)  # NOT_FINITE is outside
    chosen = values.gather(1, inside[:, None]).squeeze(1)
    return Logprobs(rows, chosen, counts, ids, top)


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
