"""What a sequence is admitted with."""

from dataclasses import dataclass

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.sampling_params import SlidingWindow


@dataclass(frozen=True, eq=False)
class Admission:
    """A prompt, and the room that its sequence gets for it and for its output.

    num_tokens, longest_append: see PagedKVCache.reserve. shares: whether it begins with a prefix that others have
    published; salt: see PagedKVCache.match_prefix. sliding: from its first token on. encoder_len: tokens of an
    encoder's prompt, with which the prompt begins.
    """

    token_ids: Int64Array
    num_tokens: int
    longest_append: int
    shares: bool
    salt: bytes = b""
    encoder_len: int = 0
    sliding: SlidingWindow | None = None
