"""How a receiver learns that a push has landed: one signal word and one payload word a reservation.

signal word   bits 62…40 generation of the slot (never 0) | bits 39…0 tokens landed in all layers
payload word  the sender's result, the first sampled token
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.cache.errors import InvalidArgument
from tandem.transfer.errors import NoFreeSignal

GENERATION_BITS = 23  # the sign bit of the int64 word stays clear
TOKEN_BITS = 40
MAX_GENERATION = 2**GENERATION_BITS - 1
MAX_TOKENS = 2**TOKEN_BITS - 1

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Signal:
    """A signal slot in one of its uses."""

    slot: int
    generation: int


def pack_signal(generation: int, num_tokens: int) -> int:
    """The signal word, never 0. InvalidArgument when a part does not fit its bits."""
    if not 1 <= generation <= MAX_GENERATION:
        raise InvalidArgument(f"generation is {generation}; 1 … {MAX_GENERATION} are accepted")
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise InvalidArgument(f"num_tokens is {num_tokens}; 0 … {MAX_TOKENS} are accepted")
    return generation << TOKEN_BITS | num_tokens


def unpack_signal(word: int) -> tuple[int, int]:
    """(generation, tokens landed); generation 0 means that nothing was ever posted."""
    return word >> TOKEN_BITS, word & MAX_TOKENS


class SignalBoard:
    """Which mailbox rows of a receiver are in use, and for the how-many-th time. Owned by its step thread.

    Release a slot only when its writer is quiet, as with pages: a late post would overwrite the next user's row.
    """

    def __init__(self, num_signals: int) -> None:
        self._generations = np.zeros(num_signals, np.int64)
        self._held = np.zeros(num_signals, np.bool_)
        self._free = deque(range(num_signals))  # first in, first out: a slot rests as long as it can

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Signal:
        """A slot under a generation that no signal in the mailbox carries; NoFreeSignal when all are held."""
        if not self._free:
            raise NoFreeSignal(f"all {self._held.size} signal slots are held; try again after a release")
        slot = self._free.popleft()
        generation = int(self._generations[slot]) % MAX_GENERATION + 1
        self._generations[slot] = generation
        self._held[slot] = True
        return Signal(slot, generation)

    def release(self, signal: Signal) -> None:
        """Gives the slot back; nothing happens when that use of the slot is over already."""
        if self._held[signal.slot] and self._generations[signal.slot] == signal.generation:
            self._held[signal.slot] = False
            self._free.append(signal.slot)

    @staticmethod
    def landed(mailbox: Int64Array, slots: Int64Array, generations: Int64Array) -> Int64Array:
        """int64 [n]: tokens landed for each waiting (slot, generation), 0 where the row speaks of another generation.

        mailbox: int64 [num_signals, 2], from Transport.mailbox().
        """
        words = mailbox[slots, 0]
        return np.where(words >> TOKEN_BITS == generations, words & MAX_TOKENS, 0)
