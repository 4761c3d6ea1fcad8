"""The room that a request's sequence gets."""

import math

from tandem.cache.operations.holdings import Room
from tandem.workers.config import LoopSettings, SpeculationSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.sampling.sampling_params import SlidingWindow
from tandem.workers.wire.prompt_spec import PromptSpec

LONGEST_APPEND = 2  # tokens of one sequence in forwards not known to be done: the next step, and the one in flight


class SequenceRoom:
    """Owned by the step thread."""

    def __init__(self, engine: Engine, settings: LoopSettings) -> None:
        self._engine = engine
        self._max_batch_tokens = settings.max_batch_tokens
        self._longest_append = longest_append(settings.speculation)
        self._reserved_output = settings.parking.reserved_output
        self.margin = 2 * (settings.speculation.tokens + 1) + LONGEST_APPEND
        """Positions of a sequence that steps may write which are not read yet, or are launched next."""

    def reach(self, prompt: PromptSpec, max_tokens: int, *, local: bool = False) -> tuple[int, int]:
        """Returns how long the sequence of a request may become, and the longest append of one forward. local: its
        prompt is yet to be computed here."""
        capacity = len(prompt) + max_tokens - 1  # the last token is never fed back
        longest = max(self._longest_append, min(len(prompt), self._max_batch_tokens if local else 0))
        if prompt.sliding is not None:
            capacity = min(capacity, self._slid_length(prompt.sliding, len(prompt) if local else 0))
        return capacity, longest

    def first_reach(
        self, prompt: PromptSpec, max_tokens: int, num_output: int = 0, *, local: bool = False
    ) -> tuple[int, int]:
        """Returns reach() with the part of the output that is reserved after num_output tokens. With a sliding window
        that is all of it."""
        capacity, longest = self.reach(prompt, max_tokens, local=local)
        if self._reserved_output == 1 or prompt.sliding is not None:
            return capacity, longest
        part = max(math.ceil(self._reserved_output * (max_tokens - num_output)), self.margin)
        return min(capacity, len(prompt) + num_output + part), longest

    def for_longest(self) -> list[Room]:
        """Returns the room for a prompt of the greatest length, with an encoder of either half."""
        engine = self._engine
        longest, most = engine.max_sequence_length, self._max_batch_tokens
        halves = (0, longest) if engine.layout.has_encoder else (0,)
        return [engine.room(longest, most, encoder_len) for encoder_len in halves]

    def _slid_length(self, sliding: SlidingWindow, prompt: int) -> int:
        """Returns the most indices that a sequence takes up if it slides after a prompt of so many tokens: see
        SlidingTable.longest."""
        return max(prompt, sliding.window + 2 * self._engine.layout.page_size - 1)


def longest_append(speculation: SpeculationSettings) -> int:
    """Returns the tokens of one decoded sequence in forwards not known to be done."""
    return LONGEST_APPEND + speculation.tokens
