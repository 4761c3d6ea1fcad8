"""Drawing of tokens for a batch. A draw depends on the row's logits, parameters, seed and position, on nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.workers.sample_batch import GREEDY_BELOW, NO_LOGPROBS, SampleBatch

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [n, vocab], rows, draws, temperature, top_p, min_p, top_k) -> token ids int64 [m]; see _Columns."""

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


@dataclass(frozen=True, eq=False)
class _Columns:
    """Parameters of the rows that are drawn, [m, 1] each but rows [m], on the logits' device; top_k 0 takes all."""

    rows: Tensor
    draws: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor

    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All [m]."""
        columns = (self.draws, self.temperature, self.top_p, self.min_p, self.top_k)
        draws, temperature, top_p, min_p, top_k = (column.squeeze(1) for column in columns)
        return self.rows, draws, temperature, top_p, min_p, top_k


class Sampler:
    """Draws one token a row; filters in vLLM's order: temperature, min_p, top_k, top_p. Nothing waits for a device."""

    def __init__(self, draw: Draw | None = None) -> None:
        """draw: None draws by torch operations; see choose_draw."""
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
            columns = _upload(part, drawn, uniform(part.seed, positions[drawn]), logits)
            if self._draw is not None:
                tokens[columns.rows] = self._draw(logits, *columns.flat())
            else:
                weights = _filtered(logits[columns.rows].float() / columns.temperature, part, columns)
                tokens[columns.rows] = _invert(weights, columns.draws)
        return tokens, _logprobs(logits, tokens, params.num_logprobs)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair, [n]: SplitMix64 (Steele, Lea, Flood 2014) seeded by a hash of the seed."""
    bits = _mix(_mix(seeds + GOLDEN_GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _upload(params: SampleBatch, rows: NDArray[np.int64], draws: NDArray[np.float64], logits: Tensor) -> _Columns:
    """params: those of `rows` alone; all in one copy."""
    top_k = np.clip(params.top_k, 0, logits.shape[-1])
    arrays = [rows, draws, params.temperature, params.top_p, params.min_p, top_k]
    first, *columns = upload(arrays, logits.device)
    return _Columns(first, *(column[:, None] for column in columns))


def _filtered(scaled: Tensor, params: SampleBatch, columns: _Columns) -> Tensor:
    """Probabilities [n, vocab], 0 below the threshold that each filter sets; rows need not sum to 1.

    Equals of a kept token are all kept. A filter that a row does not use changes nothing in it, so that a draw does
    not depend on what else is in the batch.
    """
    probabilities = scaled.softmax(dim=-1)
    if (params.min_p > 0).any():
        best = probabilities.amax(dim=-1, keepdim=True)
        probabilities.mul_(probabilities >= columns.min_p * best)
    if (params.top_k > 0).any():
        most = min(int(params.top_k.max()), scaled.shape[-1])
        probabilities.mul_(scaled >= _top_k_threshold(scaled, most, columns))
    if (params.top_p < 1).any():
        probabilities.mul_(probabilities >= _top_p_threshold(probabilities, columns.top_p))
    return probabilities


def _top_k_threshold(scaled: Tensor, most: int, columns: _Columns) -> Tensor:
    """The k-th best value of each row, k at most `most`, [n, 1]; -inf where top_k takes all."""
    best = scaled.topk(most, dim=-1).values
    return best.gather(1, (columns.top_k - 1).clamp_(min=0)).masked_fill_(columns.top_k == 0, -torch.inf)


def _top_p_threshold(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The least probability, [n, 1], of the fewest best tokens that together reach top_p of their row's sum."""
    ascending = _sort(probabilities)
    sums = ascending.cumsum(dim=-1, dtype=torch.float64)
    dropped = torch.searchsorted(sums, (1 - top_p.double()) * sums[:, -1:], right=True)
    return ascending.gather(1, dropped.clamp_(max=ascending.shape[-1] - 1))


def _sort(values: Tensor) -> Tensor:
    """Rows in ascending order. On a CPU by numpy, which sorts 32 rows of 2048 six times as fast as torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index at which the running sum of a row exceeds draws · total, [n]. Weight 0 is never drawn, where
    all are finite.

    In the order of token ids, not of probability: rounding that swaps near-equals then does not change a draw.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(sums, draws * sums[:, -1:], right=True)
    # draws · total may round up to the total itself: then the last index that carries weight
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    # Of a row that is not finite both are behind its end: such a token would fail the whole batch's next forward.
    return torch.minimum(index, last).clamp_(max=weights.shape[-1] - 1).squeeze(1)


def _logprobs(logits: Tensor, tokens: Tensor, num_logprobs: NDArray[np.int64]) -> Logprobs | None:
    rows = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    if rows.size == 0:
        return None
    (where,) = upload([rows], logits.device)
    values = logits[where].float().log_softmax(dim=-1)
    counts = np.minimum(num_logprobs[rows], logits.shape[-1])
    top, ids = values.topk(int(counts.max()), dim=-1)
    chosen = values.gather(1, tokens[where][:, None]).squeeze(1)
    return Logprobs(rows, chosen, counts, ids, top)
