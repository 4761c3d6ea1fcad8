"""The uniform numbers that tokens are sampled with, and the log-probabilities that go with tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.workers.sampling.sample_batch import NO_LOGPROBS

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


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

    def map(self, function: Callable[[Tensor], Tensor]) -> "Logprobs":
        """The same with each tensor replaced by what `function` makes of it."""
        return Logprobs(
            self.rows, function(self.chosen), self.counts, function(self.top_ids), function(self.top_logprobs)
        )


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair, [n]: SplitMix64 (Steele, Lea, Flood 2014) seeded by a hash of the seed."""
    bits = _mix(_mix(seeds + GOLDEN_GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def logprobs_of(logits: Tensor, tokens: Tensor, num_logprobs: NDArray[np.int64]) -> Logprobs | None:
    """Of tokens int64 [n] under logits [n, vocab]; None where no row asks."""
    rows = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    if rows.size == 0:
        return None
    (where,) = upload([rows], logits.device)
    values = logits[where].float().log_softmax(dim=-1)
    counts = np.minimum(num_logprobs[rows], logits.shape[-1])
    top, ids = values.topk(int(counts.max()), dim=-1)
    chosen = values.gather(1, tokens[where][:, None]).squeeze(1)
    return Logprobs(rows, chosen, counts, ids, top)
