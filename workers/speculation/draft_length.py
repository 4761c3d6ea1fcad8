"""How many tokens are drafted for one sequence: as many as are likely to hold, none for a while when few do."""

from collections.abc import Sequence

MEMORY = 0.9  # what a draft still counts when the next one is verified
FIRST_HELD, FIRST_TRIED = 1.5, 2.0  # before the first draft
LEAST_HELD = 0.25  # of the tokens tried: with fewer a sequence gets no drafts for a while
LONGEST_PAUSE = 64  # tokens


def likely_to_hold(share: float, drafted: int) -> float:
    """How many of so many drafted tokens hold on average, where this share of tried ones does."""
    return float(drafted) if share == 1 else share * (1 - share**drafted) / (1 - share)


class Acceptance:
    """What a worker's drafts of late have come to: of a new sequence they are likely to do the same."""

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
        """Of tried tokens those that held."""
        return self._held / self._tried


class DraftLength:
    """Follows which share of a sequence's drafted tokens held, of those that were tried: up to the first that did not.

    While less than LEAST_HELD hold, each draft of which nothing does doubles a pause, up to LONGEST_PAUSE tokens. So a
    sequence whose drafts never hold pays for one of LONGEST_PAUSE steps in the end.
    """

    def __init__(self, share: float = FIRST_HELD / FIRST_TRIED) -> None:
        """share: of tokens that are likely to hold, before the first was tried; more than of a first draft count as
        that."""
        self._held = FIRST_TRIED * min(share, FIRST_HELD / FIRST_TRIED)
        self._tried = FIRST_TRIED
        self._pause = 1
        self._resumes = 0  # the number of output tokens from which drafts are made again

    def worth(self, drafted: int) -> float:
        """How many of so many drafted tokens are likely to hold; 0 where a draft is no more than an attempt."""
        share = self._held / self._tried
        return 0.0 if share < LEAST_HELD else likely_to_hold(share, drafted)

    def next(self, num_output: int, best: Sequence[int]) -> int:
        """Tokens to draft behind so many output tokens. best: by the share that holds, in hundredths from 0 to 100."""
        return 0 if num_output < self._resumes else best[int(100 * self._held / self._tried)]

    def verified(self, drafted: int, accepted: int, num_output: int) -> None:
        """Of a draft, at least one token, so many were accepted; the output now has num_output tokens."""
        self._held = MEMORY * self._held + accepted
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)
        if accepted:
            self._pause = 1
        elif self._held < LEAST_HELD * self._tried:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._resumes = num_output + self._pause
