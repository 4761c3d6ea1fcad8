"""Tells a receiver that all KV of a push is there, by one signal word and one payload word a reservation.

signal word   bits 62…40 generation of the row (never 0) | bits 39…0 tokens landed in all layers
payload word  bits 62…32 digest of the KV sent, 0 without one | bits 31…0 the first sampled token

No word carries the epoch: each epoch has mailboxes of its own, and an earlier one's are not mapped.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.errors import NoFreeSignal

GENERATION_BITS = 23  # the sign bit of the int64 word stays clear
TOKEN_BITS = 40
TOKEN_ID_BITS = 32
DIGEST_BITS = 31
MAX_GENERATION = 2**GENERATION_BITS - 1
MAX_TOKENS = 2**TOKEN_BITS - 1


@dataclass(frozen=True)
class Signal:
    """A mailbox row in one of its uses."""

    row: int
    generation: int


def pack_signal(generation: int, num_tokens: int) -> int:
    """The signal word, never 0. InvalidArgument when a part does not fit its bits."""
    if not 1 <= generation <= MAX_GENERATION:
        raise InvalidArgument(f"generation is {generation}; it must be from 1 to {MAX_GENERATION}")
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise InvalidArgument(f"num_tokens is {num_tokens}; it must be from 0 to {MAX_TOKENS}")
    return generation << TOKEN_BITS | num_tokens


def unpack_signal(word: int) -> tuple[int, int]:
    """(generation, tokens landed); generation 0 means that nothing was ever posted."""
    return word >> TOKEN_BITS, word & MAX_TOKENS


def pack_payload(token_id: int, digest: int) -> int:
    """The payload word. InvalidArgument when a part does not fit its bits."""
    for name, value, bits in (("token_id", token_id, TOKEN_ID_BITS), ("digest", digest, DIGEST_BITS)):
        if not 0 <= value < 1 << bits:
            raise InvalidArgument(f"{name} is {value}; it must be from 0 to {(1 << bits) - 1}")
    return digest << TOKEN_ID_BITS | token_id


def unpack_payload(word: int) -> tuple[int, int]:
    """Returns (token id, digest)."""
    return word & (1 << TOKEN_ID_BITS) - 1, word >> TOKEN_ID_BITS


def is_newer(generation: int, other: int) -> bool:
    """Whether a use of a row comes after another use of it; generations go round after MAX_GENERATION."""
    return 0 < (generation - other) % MAX_GENERATION <= MAX_GENERATION // 2


class SignalBoard:
    """Tells which mailbox rows of a receiver are in use, and counts the uses of each. Owned by its step thread.

    Release a row only when its writer is quiet, as with pages: a late post would overwrite the row of its next user.
    """

    def __init__(self, num_signals: int) -> None:
        self._generations = np.zeros(num_signals, np.int64)
        self._held = np.zeros(num_signals, np.bool_)
        self._free = deque(range(num_signals))  # first in, first out: a row rests as long as it can
        self._seen = np.zeros(num_signals, np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Signal:
        """A row under a generation that no signal in the mailbox carries; NoFreeSignal when all are held."""
        if not self._free:
            raise NoFreeSignal(f"all {self._held.size} mailbox rows are held; try again after a release")
        row = self._free.popleft()
        generation = int(self._generations[row]) % MAX_GENERATION + 1
        self._generations[row] = generation
        self._held[row] = True
        return Signal(row, generation)

    def release(self, signal: Signal) -> None:
        """Gives the row back; nothing happens when that use of the row is over already."""
        if self._held[signal.row] and self._generations[signal.row] == signal.generation:
            self._held[signal.row] = False
            self._free.append(signal.row)

    def count_stale(self, mailbox: Int64Array) -> int:
        """How many rows got a signal of another use than their last one since the call before."""
        words = mailbox[: self._seen.size, 0]
        stale = (words != self._seen) & (words >> TOKEN_BITS != self._generations)
        self._seen = words.copy()
        return int(np.count_nonzero(stale))

    @staticmethod
    def landed(mailbox: Int64Array, rows: Int64Array, generations: Int64Array) -> Int64Array:
        """int64 [n]: tokens landed for each waiting (row, generation), 0 where the row speaks of another generation.

        mailbox: int64 [≥ num_signals, 2], from Transport.mailbox().
        """
        words = mailbox[rows, 0]
        return np.where(words >> TOKEN_BITS == generations, words & MAX_TOKENS, 0)
