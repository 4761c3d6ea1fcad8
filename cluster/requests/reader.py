"""What reads long requests, in a process of its own. It imports little: that process has memory of its own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.text.prompt_tokens import prompt_tokens
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

T = TypeVar("T")
NICE = 5  # streams go first


class Reader:
    """The object of such a process."""

    def __init__(self, folder: Path) -> None:
        """folder: of the checkpoint."""
        os.nice(NICE)
        os.environ["RUST_BACKTRACE"] = "0"  # a stranger decides how often the tokenizer panics
        self._tokenizer = Tokenizer.from_folder(folder)

    def ready(self) -> None:
        """Returns once the constructor has."""

    def tokens(self, message: inference_pb2.GenerateRequest, most: int | None = None) -> Int64Array:
        """As prompt_tokens(); of more than `most` the last."""
        ids = prompt_tokens(self._tokenizer, message)
        return ids if most is None else ids[max(0, len(ids) - most) :]

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """function: of a module."""
        return function(*arguments)
