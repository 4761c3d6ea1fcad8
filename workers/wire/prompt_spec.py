"""The prompt of a request as one value, from the gateway's validator to the workers that compute and keep it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.sampling_params import SlidingWindow


class EncoderPrompt(NamedTuple):
    """How many tokens an encoder's prompt has, and how many positions these take up as whole pages."""

    length: int
    border: int

    @property
    def padding(self) -> int:
        return self.border - self.length


MOST_READ = 256
"""The most prompts of one call of Worker/ReadPrompts."""

NO_ENCODER = EncoderPrompt(0, 0)


@dataclass(frozen=True, eq=False)
class PromptSpec:
    """A prompt, and how its sequence is computed and kept."""

    token_ids: Int64Array  # [n], n at least 1; of a model with an encoder its tokens, padding, then the decoder's
    salt: bytes = b""  # only prompts of the same salt share prefixes; a worker's has the adapter in it: adapter_salt()
    encoder: EncoderPrompt = NO_ENCODER  # what token_ids begin with
    sliding: SlidingWindow | None = None  # how the sequence slides after the prompt
    whole: bool = False  # no prefix is matched
    num_output: int = 0  # tokens at its end that an earlier placement of the request has put out
    priority: int = 0  # of the request: a lower number is served first
    adapter: bytes = b""  # digest of the LoRA adapter that computes it; empty: none does

    def __len__(self) -> int:
        return self.token_ids.size

    @property
    def num_decoder(self) -> int:
        """The number of tokens after the encoder's; all without an encoder."""
        return len(self) - self.encoder.border

    @property
    def unpadded(self) -> Int64Array:
        """The encoder's tokens, then the decoder's."""
        return np.concatenate((self.token_ids[: self.encoder.length], self.token_ids[self.encoder.border :]))

    def fits_window(self, num_output: int) -> bool:
        """Whether a sequence that slides has dropped nothing after so many tokens; True of others."""
        return self.sliding is None or len(self) + num_output <= self.sliding.window

    def going_on(self, output: Sequence[int], *, whole: bool = False) -> "PromptSpec":
        """Returns the prompt of the next placement, with the output tokens."""
        token_ids = np.concatenate((self.token_ids, np.array(output, np.int64)))
        return replace(self, token_ids=token_ids, whole=whole, num_output=len(output))
