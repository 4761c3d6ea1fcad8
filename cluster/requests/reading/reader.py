"""Reads long requests and compiles grammars, in a process of its own.

It imports little: that process has memory of its own.
"""

import os
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.text.prompt_tokens import prompt_tokens
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.sampling.guided import Grammars, Guided

T = TypeVar("T")
NICE = 5  # streams go first
STACK_BYTES = 1 << 20  # of the compiler's thread; workers have more
GUIDE_BYTES = 1 << 30  # that compiling one grammar may add to this process


class Reader:
    """The reader in its own process."""

    def __init__(self, folder: Path) -> None:
        """folder: the checkpoint's."""
        os.nice(NICE)
        os.environ["RUST_BACKTRACE"] = "0"  # a stranger decides how often the tokenizer panics
        self._folder = folder
        self._tokenizer = Tokenizer.from_folder(folder)
        self._grammars: Grammars | None = None
        default = threading.stack_size(STACK_BYTES)
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._compiler.submit(os.getpid).result()
        threading.stack_size(default)

    def ready(self) -> None:
        """Returns once the constructor has run."""

    def tokens(self, message: inference_pb2.GenerateRequest, most: int | None = None) -> Int64Array:
        """Returns the ids of prompt_tokens(), or their last `most`."""
        ids = prompt_tokens(self._tokenizer, message)
        return ids if most is None else ids[max(0, len(ids) - most) :]

    def texts(self, texts: Sequence[str], special: bool, most: int | None) -> list[Int64Array]:
        """Encodes texts as Tokenizer.encode_all() does."""
        assert self._tokenizer is not None, "texts are refused without one"
        ids = self._tokenizer.encode_all(texts, add_special_tokens=special, most=most)
        return [np.array(one, np.int64) for one in ids]

    def check_guide(self, guided: Guided, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Checks a grammar as Grammars.check() does.

        Some grammars end this process: nested ones, for which the compiler calls itself, on a stack that is smaller
        than the workers' stacks; and small schemas whose references multiply, for which it takes gigabytes.
        """
        self._grammars = self._grammars or Grammars(self._folder, vocab_size, eos_token_ids)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _data_bytes() + GUIDE_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        try:
            self._compiler.submit(self._grammars.check, guided).result()
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls a module's function."""
        return function(*arguments)


def _data_bytes() -> int:
    """Returns the bytes that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
