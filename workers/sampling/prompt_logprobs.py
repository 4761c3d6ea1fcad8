"""The log-probabilities of a prompt's own tokens, on their way from its forwards to the call that wants them."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.pending_samples import to_host

SLICE_BYTES = 32 << 20  # of float32 logits that are in memory together
NUMBERS_A_PIECE = 1024  # log-probabilities that travel in one message


class PackedLogprobs(NamedTuple):
    """The natural logarithms of n consecutive prompt tokens' probabilities, of the raw distribution. They are there
    once the device is past what was launched before."""

    logprobs: NDArray[np.float32]  # [n], each token's own
    top_ids: NDArray[np.int32]  # [n, k], best first
    top_logprobs: NDArray[np.float32]  # [n, k]

    def pieces(self, size: int) -> "Iterator[PackedLogprobs]":
        """Yields pieces of at most `size` tokens each."""
        for begin in range(0, len(self.logprobs), size):
            part = slice(begin, begin + size)
            yield PackedLogprobs(self.logprobs[part], self.top_ids[part], self.top_logprobs[part])


Deliver = Callable[[Sequence[PackedLogprobs]], None]


class PromptLogprobs:
    """Gathers the log-probabilities of one prompt, chunk by chunk. Owned by the step thread.

    Its copies are there once the first token is, which is sampled after them.
    """

    def __init__(self, num_top: int, deliver: Deliver) -> None:
        """deliver: gets the log-probabilities of all tokens but the first, in order."""
        self._deliver = deliver
        self._chunks: list[PackedLogprobs] = []
        self.num_top = num_top

    def add(self, chunk: PackedLogprobs) -> None:
        """Adds the next tokens' values. Their copies may still be under way."""
        self._chunks.append(chunk)

    def deliver(self) -> None:
        """Delivers all, once the device is past all forwards of the prompt."""
        size = max(1, NUMBERS_A_PIECE // (1 + self.num_top))
        self._deliver([piece for chunk in self._chunks for piece in chunk.pieces(size)])


class Scored(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted, int64 [n]: those that follow the first rows of a chunk.
    num_top: so many of the likeliest tokens at each place are wanted, too."""

    targets: Int64Array
    num_top: int


def logprobs_of_targets(
    hidden: Tensor, logits_of: Callable[[Tensor], Tensor], targets: Tensor, num_top: int, vocab_size: int
) -> PackedLogprobs:
    """Returns for targets int64 [n], which follow the rows of hidden [n, hidden], their log-probabilities, float32 [n].
    Also returns ids and log-probabilities of the num_top likeliest tokens, int32 and float32 [n, num_top], best first.

    Works slice by slice, because the logits of all rows would take gigabytes. logits_of: see DenseDecoder.logits.
    """
    rows, num_top = max(1, SLICE_BYTES // (4 * vocab_size)), min(num_top, vocab_size)
    chosen = hidden.new_empty(targets.shape[0], dtype=torch.float32)
    top_ids = hidden.new_empty((targets.shape[0], num_top), dtype=torch.int32)
    top_logprobs = hidden.new_empty((targets.shape[0], num_top), dtype=torch.float32)
    for begin in range(0, targets.shape[0], rows):
        part = slice(begin, begin + rows)
        logits = logits_of(hidden[part]).float()
        total = logits.logsumexp(-1, keepdim=True)
        chosen[part] = (logits.gather(1, targets[part, None]) - total)[:, 0]
        if num_top:
            best, ids = logits.topk(num_top, dim=-1)
            top_logprobs[part], top_ids[part] = best - total, ids
    return PackedLogprobs(to_host(chosen).numpy(), to_host(top_ids).numpy(), to_host(top_logprobs).numpy())
