"""What proposes tokens that a verify step checks."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.sampling_params import SamplingParams


class DraftAsk(NamedTuple):
    """One sequence for which a draft is wanted."""

    sequence_id: int
    context: Int64Array  # prompt and output so far, [n]; not to be written to
    most: int  # tokens of its draft, at least 1
    params: SamplingParams


class Drafter(Protocol):
    """Owned by the step thread. A draft may be any tokens: wrong ones cost time, and change no output.

    computes: propose() runs forwards of the sequences, so that it is called only where no step is in flight.
    """

    computes: bool

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        """For each ask up to `most` tokens of the vocabulary that may follow its context, int64; none where it
        has no idea."""
        ...

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended. Idempotent, and right for one that was never asked for."""
        ...
