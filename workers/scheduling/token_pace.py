"""How many prompt tokens a step may have beside decode rows, which wait no longer than they may."""

LEAST_CHUNK = 64  # tokens; a forward of fewer takes a GPU about as long
SMOOTHING = 0.2  # the weight of the latest step in step_seconds
CORRECTION = 0.5  # how much of the way to what fits one step goes
FASTEST_GROWTH = 2.0


class TokenPace:
    """Follows what steps have taken. Pure: it is told times, and reads no clock.

    It steers for chunks with which a step takes token_seconds. Beside the last chunk of n tokens a step took `extra`
    seconds longer than without; so the next may have n · (token_seconds - step) / extra. Where extra grows with n,
    whatever a forward of few tokens takes, this ends at the length that fits.
    """

    def __init__(self, token_seconds: float | None, most: int) -> None:
        """token_seconds: from one token of a row to its next; None sets no bound. most: tokens of a chunk."""
        self._bound = token_seconds
        self._most = most
        self._least = min(LEAST_CHUNK, most)
        self._allowed = float(most if token_seconds is None else self._least)
        self.step_seconds = 0.0
        """Of a step without prompts beside it, of late; 0 before there was one."""

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens beside rows in the next step."""
        return int(self._allowed)

    def measured(self, seconds: float, prompt_tokens: int) -> None:
        """A step's tokens came `seconds` after those of the step before; the device had so many prompt tokens between
        the two."""
        if prompt_tokens == 0:
            before = self.step_seconds or seconds
            self.step_seconds = before + SMOOTHING * (seconds - before)
        elif self._bound is not None and (2 * prompt_tokens >= self._allowed or seconds > self._bound):
            room = max(self._bound - self.step_seconds, 0.0)
            extra = max(seconds - self.step_seconds, 1e-9)
            fits = min(prompt_tokens * room / extra, FASTEST_GROWTH * self._allowed)
            smoothed = self._allowed + CORRECTION * (fits - self._allowed)
            self._allowed = min(max(smoothed, self._least), self._most)
