"""How long steps take: what a router needs to know of a worker's pace."""

import time

from tandem.workers.scheduling.batch import StepBatch

STEP_WEIGHT = 0.1  # of the newest decode step in the average
WHOLE_TOKENS = 128
FORGET = 0.8  # the weight of earlier prompts, to the newest's 1


class StepMeter:
    """Measures each step with work. Owned by the step thread; other threads may read its attributes.

    steps: with rows or prompt chunks, so far. token_seconds: from one decode step to the next, while rows are stepped.
    prompt_tokens_per_second: while prompts are computed. whole_prompt_rate: the same, of WHOLE_TOKENS or more at a
    time: short ends of prompts, whose prefixes were cached, take a forward each, and may wait for these. All are moving
    averages, 0 before the first.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.token_seconds = 0.0
        self.prompt_tokens_per_second = 0.0
        self.whole_prompt_rate = 0.0
        self._began = 0.0
        self._stepping = False  # whether the last step had rows
        self._tokens, self._seconds = 0, 0.0  # of prompts, since the last one that came to its end
        self._past_tokens, self._past_seconds = 0.0, 0.0

    def begin(self, batch: StepBatch) -> None:
        """Notes that a step begins, perhaps one without work."""
        now = time.perf_counter()
        if batch.decodes is not None:
            if self._stepping:
                seconds = now - self._began
                before = self.token_seconds or seconds
                self.token_seconds = before + STEP_WEIGHT * (seconds - before)
            self.steps += 1
        elif batch.chunks:
            self.steps += 1
        self._stepping = batch.decodes is not None
        self._began = now

    def end(self, batch: StepBatch, *, waited: bool) -> None:
        """The step is launched. waited: whether the host has waited for the device, as for a first token."""
        if not batch.chunks:
            return
        self._tokens += sum(chunk.length for chunk in batch.chunks)
        self._seconds += time.perf_counter() - self._began
        if waited:
            self._past_tokens = FORGET * self._past_tokens + self._tokens
            self._past_seconds = FORGET * self._past_seconds + self._seconds
            self.prompt_tokens_per_second = self._past_tokens / self._past_seconds
            if self._tokens >= WHOLE_TOKENS:
                rate = self._tokens / self._seconds
                self.whole_prompt_rate = rate + FORGET * ((self.whole_prompt_rate or rate) - rate)
            self._tokens, self._seconds = 0, 0.0
