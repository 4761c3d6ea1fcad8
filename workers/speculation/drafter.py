"""A drafter proposes tokens, which a verify step checks."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.sampling_params import SamplingParams


class DraftAsk(NamedTuple):
    """A request for one sequence's draft."""

    sequence_id: int
    context: Int64Array  # prompt and output so far, [n]; not to be written to
    most: int  # tokens of its draft, at least 1
    params: SamplingParams


class Drafter(Protocol):
    """Owned by the step thread. A draft may be any tokens: wrong ones cost time, but change no output.

    computes: whether propose() runs forwards, so that it may be called only while no step is in flight.
    """

    computes: bool

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        """Proposes for each ask up to `most` token ids that may follow its context, int64; empty without a proposal."""
        ...

    def forget(self, sequence_id: int) -> None:
        """Forgets a sequence that has ended. Idempotent, also for unknown sequences."""
        ...
