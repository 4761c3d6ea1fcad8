"""The server's address, and the output of a script: a line for each step, and exit code 1 if a step failed.

The scripts run with an environment of their own, which has a client and not tandem.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

HTTP = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8000")
"""URL of tandem's HTTP server, without /v1."""
BASE_URL = f"{HTTP}/v1"
MODEL = os.environ.get("TANDEM_MODEL", "model")
API_KEY = os.environ.get("TANDEM_API_KEY", "none")
TOKENIZER = os.environ.get("TANDEM_TOKENIZER", "")
"""The checkpoint's folder."""
CHAT = [{"role": "user", "content": "What is a cache?"}]
PROMPT = "The with statement is used to"
MOST_SAID = 2000  # characters of a failure


class Wrong(Exception):
    """An answer is not what the API promises."""


def check(holds: object, said: str, *got: Any) -> None:
    """Raises Wrong unless it holds. said: what the API promises; got: what came instead."""
    if not holds:
        raise Wrong(f"{said}; got " + ", ".join(map(repr, got)) if got else said)


@contextmanager
def refused(kind: type[Exception], **fields: Any):  # noqa: ANN201  the environment's Python may be any
    """The block raises an error of the client's kind with these attributes."""
    try:
        yield
    except kind as error:
        for name, value in fields.items():
            check(getattr(error, name) == value, f"{kind.__name__} has {name} {value!r}", getattr(error, name), error)
    else:
        raise Wrong(f"{kind.__name__} was to be raised, and nothing was")


def run(*steps: Callable[[], object]) -> None:
    """Runs all of them, whatever the others do. A step prints one line: `ok NAME` or `failed NAME: reason`."""
    failed = False
    for step in steps:
        name = step.__name__.replace("_", " ")
        try:
            step()
        except Exception as error:
            failed = True
            if not isinstance(error, Wrong):
                traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"failed {name}: {reason:.{MOST_SAID}}", flush=True)
        else:
            print(f"ok {name}", flush=True)
    sys.exit(failed)
