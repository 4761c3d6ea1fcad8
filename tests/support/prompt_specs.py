"""Prompts of tests as the workers take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.workers.wire.prompt_spec import PromptSpec


def spec_of(token_ids: Sequence[int] | np.ndarray, **fields: Any) -> PromptSpec:
    return PromptSpec(np.asarray(token_ids, np.int64), **fields)
