"""The times of a request's messages: while it runs, and as a value afterwards."""

import base64
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tandem.cluster.tools.bench.mixes import Slo

PERCENTILE = 90  # of a request's gaps, which the SLO bounds


@dataclass
class Running:
    """One request while it is under way. All times are time.perf_counter()'s, which all processes of a host share.

    due, sent: when it was to be sent, and when it was. arrivals: of each message with tokens. output_tokens: how many
    came; expected_tokens: how many were asked for. drafted_tokens, accepted_tokens: of speculation, as the server
    reports.
    """

    expected_tokens: int
    due: float
    reusable_tokens: int = 0
    keeps_tokens: bool = False
    sent: float = 0.0
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    error: str | None = None
    is_done: bool = False

    def heard(self) -> None:
        """Records a message with tokens."""
        self.arrivals.append(time.perf_counter())

    def tokens_within(self, begin: float, end: float) -> float:
        """Returns how many tokens came in that time, if all messages carry equally many."""
        there = bisect_left(self.arrivals, end) - bisect_left(self.arrivals, begin)
        return there * max(1.0, self.output_tokens / len(self.arrivals)) if there else 0.0

    def overdue(self, now: float, slo: Slo) -> bool:
        """Returns whether the first token is already too late."""
        return bool(self.sent) and not self.arrivals and (now - self.sent) * 1e3 > slo.ttft_ms


@dataclass(frozen=True)
class Timeline:
    """One request that has ended. arrivals: float32, in base64: seconds from `sent` to each message with tokens."""

    due: float
    sent: float
    arrivals: str
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    error: str | None

    @classmethod
    def of(cls, running: Running) -> "Timeline":
        seconds = (np.array(running.arrivals, dtype=np.float64) - running.sent).astype("<f4")
        return cls(
            running.due,
            running.sent,
            base64.b64encode(seconds.tobytes()).decode(),
            running.prompt_tokens,
            running.cached_tokens,
            running.reusable_tokens,
            running.output_tokens,
            running.drafted_tokens,
            running.accepted_tokens,
            running.error,
        )

    @cached_property
    def seconds(self) -> np.ndarray:
        """Returns the seconds from the call to each message with tokens, float64."""
        return np.frombuffer(base64.b64decode(self.arrivals), dtype="<f4").astype(np.float64)

    @property
    def ttft(self) -> float:
        return float(self.seconds[0])

    @property
    def e2el(self) -> float:
        return float(self.seconds[-1])

    @property
    def tpot(self) -> float | None:
        """The time per output token, in seconds; None for one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.seconds)

    @property
    def late(self) -> float:
        """The seconds that the load generator sent it too late."""
        return self.sent - self.due

    def meets(self, slo: Slo, *, mean_gap: bool = False) -> bool:
        """Returns whether it meets the SLO. mean_gap: the mean of the gaps counts, as servers are often judged, not
        their p90."""
        if self.error is not None or self.ttft * 1e3 > slo.ttft_ms:
            return False
        if len(self.gaps) == 0:
            return True
        gap = self.gaps.mean() if mean_gap else np.percentile(self.gaps, PERCENTILE)
        return float(gap) * 1e3 <= slo.gap_ms
