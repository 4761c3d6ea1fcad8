"""Replaces prompts in a record, if these are not to be recorded."""

from dataclasses import replace
from hashlib import blake2b, shake_256
from secrets import token_bytes

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.sampling_params import SamplingParams

KEY_BYTES = 32
BYTES_A_TOKEN = 4


class Pseudonyms:
    """Token ids that are equal where the prompt's are equal, page by page from its beginning, and reveal nothing else.

    A page's pseudonyms follow from all tokens up to its end and from a random key, which is never written. So replayed
    prompts find the same prefixes and fill the same pages, while nobody can read or guess a text.
    """

    def __init__(self, page_size: int, vocab_size: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._key = token_bytes(KEY_BYTES)

    def tokens(self, token_ids: Int64Array) -> Int64Array:
        """int64 [n], for the token ids [n] of a prompt from its beginning."""
        chain, parts = self._key, []
        for begin in range(0, token_ids.size, self._page_size):
            page = token_ids[begin : begin + self._page_size]
            drawn = shake_256(chain + page.tobytes()).digest(KEY_BYTES + BYTES_A_TOKEN * page.size)
            chain = drawn[:KEY_BYTES]
            parts.append(np.frombuffer(drawn, np.uint32, offset=KEY_BYTES))
        return (np.concatenate(parts) % self._vocab_size).astype(np.int64) if parts else token_ids

    def salt(self, salt: bytes) -> bytes:
        """Returns as many bytes as `salt` has; none for none."""
        return blake2b(salt, digest_size=len(salt), key=self._key).digest() if salt else b""


def zeros(tokens: Int64Array) -> Int64Array:
    """Returns as many token ids, all 0."""
    return np.zeros_like(tokens)


def without_tokens(params: SamplingParams) -> SamplingParams:
    """Returns the parameters without those that name tokens or texts."""
    return replace(
        params,
        stop=(),
        stop_token_ids=(),
        logit_bias=(),
        bad_words=(),
        bad_words_ids=(),
        allowed_token_ids=(),
        guided=None,
    )
