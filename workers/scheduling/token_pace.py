"""How many prompt tokens a step may have beside decode rows, which wait no longer than they may."""

LEAST_CHUNK = 64  # tokens; a forward of fewer takes a GPU about as long
FIRST_RATE = 20_000.0  # prompt tokens a second before any were measured
SMOOTHING = 0.2  # the weight of the latest step
MARGIN = 0.92  # of token_seconds: steps vary, and nine tokens in ten should come in time


class TokenPace:
    """Follows what steps have taken. Pure: it is told times, and reads no clock.

    A step takes what its rows take and, for each prompt token beside them, what prompts take. So each step says what
    rows take, whatever stood beside them, and what is left of token_seconds is for prompts.
    """

    def __init__(self, token_seconds: float | None, most: int) -> None:
        """token_seconds: from one token of a row to its next; None sets no bound. most: tokens of a chunk."""
        self._bound = token_seconds
        self._most = most
        self._least = min(LEAST_CHUNK, most)
        self._rows_seconds: float | None = None  # of the rows of a step, of late
        self.prompt_rate = FIRST_RATE
        """Prompt tokens that the device computes a second."""

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens beside rows in the next step: with a bound a power of two, as CUDA graphs hold."""
        if self._bound is None:
            return self._most
        if self._rows_seconds is None:
            return self._least
        fit = int((MARGIN * self._bound - self._rows_seconds) * self.prompt_rate)
        return min(self._most, 1 << max(fit, self._least).bit_length() - 1)

    def measured(self, seconds: float, prompt_tokens: int) -> None:
        """A step's tokens came `seconds` after those of the step before; the device had so many prompt tokens between
        the two."""
        rows = max(seconds - prompt_tokens / self.prompt_rate, 0.0)
        before = rows if self._rows_seconds is None else self._rows_seconds
        self._rows_seconds = before + SMOOTHING * (rows - before)
