"""The terms on which a sequence is admitted."""

from collections.abc import Callable
from typing import NamedTuple

from tandem.workers.wire.prompt_spec import PromptSpec


class Admission(NamedTuple):
    """A prompt, and the room that its sequence gets for it and for its output.

    num_tokens, longest_append: see PagedKVCache.reserve. shares: whether it begins with a prefix that others have
    published. slides: whether it slides, as the prompt says, from now on. most_bytes: that a store may copy for each
    token of such a prefix which then need not be computed; None: any number. It is decided once, for all ranks and
    replays.
    """

    prompt: PromptSpec
    num_tokens: int
    longest_append: int
    shares: bool
    slides: bool = False
    most_bytes: int | None = None


MostBytes = Callable[[], int | None]
"""Admission.most_bytes of a prompt that comes now."""


def any_number() -> None:
    """Returns no bound: no copy is known to take longer than computing."""
