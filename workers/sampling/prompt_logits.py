"""The logits that a launch of prompts leaves, until first tokens are sampled from them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class PromptLogits:
    """Names the logits after the prompts that ended in one launch, a row for each, in their order."""

    number: int  # of the launch, among those with prompts
    on_device: Tensor = field(repr=False)  # [n, vocab]; nobody but the engine reads it
    left: Callable[[Tensor], None] | None = field(default=None, repr=False)  # see Engine.sample, which takes it
