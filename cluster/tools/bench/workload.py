"""A workload as plain values, which processes hand to each other, and the sessions that it stands for."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.cluster.errors import UsageError
from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.sessions import RandomSessions, Sessions, Vocabulary
from tandem.cluster.tools.bench.traces import Line, TraceSessions, read_trace


@dataclass(frozen=True)
class Workload:
    """Random sessions, or those of a trace.

    most_tokens: of one request, prompt and output together, that the server takes; None if it does not say so. The
    others are as in RandomSessions.
    """

    prompts: Lengths
    outputs: Lengths
    vocab_size: int
    seed: int = 0
    prefix: int = 0
    prefixes: int = 1
    turns: int = 1
    pause: float = 0.0
    trace: str | None = None
    most_tokens: int | None = None

    def check(self) -> None:
        """Raises UsageError if the server would refuse some of the requests, or a trace has none."""
        if self.trace is not None:
            _trace(self.trace, self.most_tokens)
            return
        longest = self.prefix + self.turns * (self.prompts.high + self.outputs.high)
        if self.most_tokens is not None and longest > self.most_tokens:
            raise UsageError(
                f"a request may have {longest} tokens ({self.turns} turns of prompts {self.prompts} and outputs "
                f"{self.outputs}, prefix {self.prefix}); the server takes {self.most_tokens}: give others"
            )

    @property
    def num_sessions(self) -> int | None:
        """The number of sessions; None: any number."""
        return None if self.trace is None else len(_trace(self.trace, self.most_tokens)[0])

    @property
    def left_out(self) -> int:
        """The number of the trace's requests that are too long for the server."""
        return 0 if self.trace is None else _trace(self.trace, self.most_tokens)[1]

    @property
    def longest_output(self) -> int:
        if self.trace is None:
            return self.outputs.high
        return max(line.output_length for line in _trace(self.trace, self.most_tokens)[0])

    def sessions(self, load: int) -> Sessions:
        """Makes the sessions. load: number of the load; no two loads have a prompt in common."""
        vocabulary = Vocabulary(self.vocab_size, self.seed)
        if self.trace is not None:
            return TraceSessions(_trace(self.trace, self.most_tokens)[0], vocabulary, load)
        return RandomSessions(
            self.prompts,
            self.outputs,
            vocabulary,
            load,
            prefix=self.prefix,
            prefixes=self.prefixes,
            turns=self.turns,
            pause=self.pause,
        )


@cache
def _trace(path: str, most_tokens: int | None) -> tuple[list[Line], int]:
    return read_trace(Path(path), most_tokens)
