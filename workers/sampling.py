"""Drawing of tokens for a batch. A draw depends on the row's logits, parameters, seed and position, on nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.workers.kernels.torch_sampling import draw as torch_draw
from tandem.workers.sample_batch import GREEDY_BELOW, NO_LOGPROBS, SampleBatch

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [n, vocab], rows, draws, temperature, top_p, min_p, top_k) -> token ids int64 [m]; see torch_sampling."""

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of the m rows that asked for them, from the raw logits (before temperature and filters).

    rows int64 [m]: which of the batch. chosen float32 [m]. top_ids int64 and top_logprobs float32 [m, most asked for],
    best first; row i asked for the first counts[i] (int64 [m]) of them. The tensors are on the logits' device.
    """

    rows: NDArray[np.int64]
    chosen: Tensor
    counts: NDArray[np.int64]
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Logprobs":
        """The same with each tensor replaced by what `function` makes of it."""
        return Logprobs(
            self.rows, function(self.chosen), self.counts, function(self.top_ids), function(self.top_logprobs)
        )


class Sampler:
    """Draws one token a row; filters in vLLM's order: temperature, min_p, top_k, top_p. Nothing waits for a device."""

    def __init__(self, draw: Draw = torch_draw) -> None:
        """draw: see choose_draw."""
        self._draw = draw

    def sample(
        self, logits: Tensor, params: SampleBatch, positions: NDArray[np.int64]
    ) -> tuple[Tensor, Logprobs | None]:
        """logits [n, vocab], of 16 bits or float32, widened only where more is asked for than the best token; positions
        [n]: index in its sequence of the token to draw.

        Returns token ids int64 [n] on the logits' device, and log-probabilities if any row asked for them.
        """
        tokens = logits.argmax(dim=-1)
        drawn = np.flatnonzero(params.temperature >= GREEDY_BELOW)
        if drawn.size:
            part = params.take(drawn)
            draws = uniform(part.seed, positions[drawn])
            columns = upload([drawn, draws, part.temperature, part.top_p, part.min_p, part.top_k], logits.device)
            tokens[columns[0]] = self._draw(logits, *columns)
        return tokens, logprobs_of(logits, tokens, params.num_logprobs)


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
