"""A pace that computes prompts at rates set by a test."""

from tandem.workers.scheduling.token_pace import TokenPace


class FixedRate(TokenPace):
    """rate, beside: prompt tokens a second without rows, and beside some; None: as fast. Nothing bounds chunks."""

    def __init__(self, most: int, rate: float, beside: float | None = None) -> None:
        super().__init__(None, most)
        self.rate = rate
        self._beside = beside

    def prompt_rate(self, rows: int = 0, positions: int = 0) -> float:
        return self._beside if rows and self._beside is not None else self.rate
