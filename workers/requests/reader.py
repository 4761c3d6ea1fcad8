"""The values wanted of a prompt that nobody decodes, and the values that its forwards have given so far."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tandem.workers.sampling.pooling import Float32Array, Reading


class Wanted(NamedTuple):
    """An embedding: the hidden state of the last token, or with `mean` the mean of all tokens from `skipped` on. With
    token_ids their logits after the last token instead."""

    mean: bool = False
    skipped: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class Reader:
    """The values of one prompt. Owned by the step thread."""

    wanted: Wanted
    num_tokens: int  # of the prompt
    values: "Float32Array | None" = field(default=None, init=False)  # [hidden], or [token_ids], once they are there
    chunks: int = field(default=0, init=False)  # whose values are yet to come

    @property
    def needs_last_only(self) -> bool:
        """Whether the tokens before the last one need no forward of this prompt's own."""
        return not self.wanted.mean

    def reading(self, computed: int, length: int) -> Reading | None:
        """Returns what a chunk of so many tokens after `computed` gives; None: nothing."""
        if self.wanted.mean:
            begin = max(0, self.wanted.skipped - computed)
            return Reading(begin, length) if begin < length else None
        is_last = computed + length == self.num_tokens
        return Reading(length - 1, length, self.wanted.token_ids) if is_last else None

    def take(self, values: "Float32Array") -> None:
        """Takes the values of the next chunk that gives some."""
        self.values = values if self.values is None else self.values + values

    @property
    def result(self) -> "Float32Array":
        """float32, of the whole prompt."""
        assert self.values is not None, "each prompt has a last token, and more than it skips"
        if self.wanted.mean:
            return self.values / np.float32(self.num_tokens - self.wanted.skipped)
        return self.values[: len(self.wanted.token_ids)] if self.wanted.token_ids else self.values
