"""Tokens that a step's last kernel writes into the host's memory itself: no copy stands after it.

word of a row   bits 62…24 turn, a number that each step has to itself, from 1 | bits 23…0 token id, or NOT_FINITE

The turn without a token is the row's ticket. A word is stored at once, so a reader that finds the turn in it has the
token, too, as with a signal (tandem.transfer.completion). Steps alternate between two halves of the memory: the host
reads one while the next step writes the other.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.pending_samples import Samples

TOKEN_BITS = 24
MAX_VOCAB = (1 << TOKEN_BITS) - 1
NOT_FINITE = MAX_VOCAB  # in place of a token: the row's logits have NaN or infinity
POLL_SECONDS = 0.00002
WAIT_SECONDS = 60.0  # a kernel that waits for another gives up long before

Turn = TypeVar("Turn", int, Tensor)


def half_of(ticket: Turn) -> Turn:
    """Returns the half of the memory that the ticket's step has: 0 or 1."""
    return ticket >> TOKEN_BITS & 1


class PostedSamples:
    """The tokens of one step's rows; see PendingSamples. No row asked for log-probabilities."""

    def __init__(
        self, words: Int64Array, ticket: int, is_idle: Callable[[], bool], seconds: float = WAIT_SECONDS
    ) -> None:
        """words: of its rows, int64 [n]. is_idle: whether nothing that was launched is under way; raises what the
        device reports. seconds: how long wait() waits."""
        self._words = words
        self._ticket = ticket
        self._is_idle = is_idle
        self._seconds = seconds
        self._tokens: Int64Array | None = None

    def is_done(self) -> bool:
        if not self._look() and self._is_idle() and not self._look():
            raise RuntimeError(f"step {self._ticket >> TOKEN_BITS} is done, but has not posted its tokens")
        return self._tokens is not None

    def wait(self) -> Samples:
        """Waits for the tokens. TimeoutError when it takes too long."""
        deadline = time.monotonic() + self._seconds
        while not self.is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._ticket >> TOKEN_BITS} took more than {self._seconds:g} s")
            time.sleep(POLL_SECONDS)
        assert self._tokens is not None
        return Samples(self._tokens, [None] * self._tokens.size)

    def _look(self) -> bool:
        if self._tokens is None:
            tokens = self._words - self._ticket
            if tokens.view(np.uint64).max() <= NOT_FINITE:
                self._tokens = tokens
        return self._tokens is not None


class PostBox:
    """The words of steps of up to num_rows rows. Its owner launches the steps, in the order of their tickets.

    Its memory may go only when nothing on the stream is under way.
    """

    def __init__(self, num_rows: int, device: torch.device, seconds: float = WAIT_SECONDS) -> None:
        """seconds: how long a step may take."""
        self._seconds = seconds
        self._on_gpu = device.type == "cuda"
        self.words = torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=self._on_gpu)
        self._host = self.words.numpy()
        self._turn = 0
        self._unread: list[PostedSamples | None] = [None, None]

    def next_ticket(self) -> int:
        """Returns the ticket of the step that is launched next. The step two before it has then been read."""
        self._turn += 1
        ticket = self._turn << TOKEN_BITS
        before = self._unread[half_of(ticket)]
        if before is not None:
            before.wait()
            self._unread[half_of(ticket)] = None
        return ticket

    def expect(self, ticket: int, num_rows: int) -> PostedSamples:
        """The samples that the step with this ticket, just launched, posts for its first rows."""
        is_idle = torch.cuda.current_stream().query if self._on_gpu else lambda: True
        half = half_of(ticket)
        self._unread[half] = posted = PostedSamples(self._host[half, :num_rows], ticket, is_idle, self._seconds)
        return posted
