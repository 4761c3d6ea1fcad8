"""What a sequence is admitted with."""

from typing import NamedTuple

from tandem.workers.wire.prompt_spec import PromptSpec


class Admission(NamedTuple):
    """A prompt, and the room that its sequence gets for it and for its output.

    num_tokens, longest_append: see PagedKVCache.reserve. shares: whether it begins with a prefix that others have
    published. slides: whether it slides, as the prompt says, from now on.
    """

    prompt: PromptSpec
    num_tokens: int
    longest_append: int
    shares: bool
    slides: bool = False
