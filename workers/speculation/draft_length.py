"""The draft length of one sequence, by its acceptance rate. If few tokens are accepted, drafts pause."""

from collections.abc import Sequence

MEMORY = 0.9  # how much older drafts count after each new one
FIRST_HELD, FIRST_TRIED = 1.5, 2.0  # accepted and tried tokens that a new sequence is assumed to have
LEAST_HELD = 0.25  # acceptance rate below which drafts pause
LONGEST_PAUSE = 64  # output tokens


def likely_to_hold(share: float, drafted: int) -> float:
    """The mean number of accepted tokens of `drafted` ones. share: the acceptance rate of each tried token."""
    return float(drafted) if share == 1 else share * (1 - share**drafted) / (1 - share)


class Acceptance:
    """The recent acceptance rate of all of a worker's drafts, which a new sequence is assumed to have."""

    MEMORY = 0.98

    def __init__(self) -> None:
        self._held, self._tried = 10 * FIRST_HELD, 10 * FIRST_TRIED
        self.num_drafts = 0

    def verified(self, drafted: int, accepted: int) -> None:
        """See DraftLength.verified."""
        self.num_drafts += 1
        self._held = self.MEMORY * self._held + accepted
        self._tried = self.MEMORY * self._tried + min(accepted + 1, drafted)

    @property
    def share(self) -> float:
        """Accepted tokens ÷ tried tokens."""
        return self._held / self._tried


class DraftLength:
    """Tracks a sequence's acceptance rate. A draft's tokens count as tried up to the first rejected one.

    While the rate is below LEAST_HELD, each draft without an accepted token doubles a pause, up to LONGEST_PAUSE
    tokens. So a sequence whose drafts are never accepted pays for one draft in LONGEST_PAUSE steps.
    """

    def __init__(self, share: float = FIRST_HELD / FIRST_TRIED) -> None:
        """share: the acceptance rate to assume at first, at most FIRST_HELD ÷ FIRST_TRIED."""
        self._held = FIRST_TRIED * min(share, FIRST_HELD / FIRST_TRIED)
        self._tried = FIRST_TRIED
        self._pause = 1
        self._resumes = 0  # drafts resume at this number of output tokens

    def worth(self, drafted: int) -> float:
        """The mean number of accepted tokens of `drafted` ones; 0 while the rate is so low that a draft is only a
        trial."""
        share = self._held / self._tried
        return 0.0 if share < LEAST_HELD else likely_to_hold(share, drafted)

    def next(self, num_output: int, best: Sequence[int]) -> int:
        """The length of the next draft; 0 during a pause. best: see best_lengths()."""
        return 0 if num_output < self._resumes else best[int(100 * self._held / self._tried)]

    def verified(self, drafted: int, accepted: int, num_output: int) -> None:
        """Counts a verified draft of at least one token. num_output: output tokens of the sequence now."""
        self._held = MEMORY * self._held + accepted
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)
        if accepted:
            self._pause = 1
        elif self._held < LEAST_HELD * self._tried:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._resumes = num_output + self._pause
