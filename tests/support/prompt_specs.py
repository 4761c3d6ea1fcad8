"""Prompts of tests as the workers take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.proto import worker_pb2
from tandem.workers.wire.messages import prompt_to_bytes
from tandem.workers.wire.prompt_spec import PromptSpec


def spec_of(token_ids: Sequence[int] | np.ndarray, **fields: Any) -> PromptSpec:
    return PromptSpec(np.asarray(token_ids, np.int64), **fields)


def prompt_message(token_ids: Sequence[int] | np.ndarray, **fields: Any) -> worker_pb2.PromptSpec:
    return worker_pb2.PromptSpec(token_ids=prompt_to_bytes(token_ids), **fields)
