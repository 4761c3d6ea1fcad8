"""The token that Ray asks for. Nothing here imports Ray, which reads its environment when it is imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GIVEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def token_shown() -> Iterator[None]:
    """Where Ray is imported within, it shows the token that this user has, as it does by itself to a Ray that it has
    started or found, to one at a given address too. RAY_AUTH_MODE decides where it is set."""
    name, known = "RAY_AUTH_MODE", _file().exists() or any(given in os.environ for given in GIVEN)
    if name in os.environ or not known:
        yield
        return
    os.environ[name] = "token"
    try:
        yield
    finally:
        del os.environ[name]


def hide_token() -> None:
    """From other users: Ray leaves its file readable for everybody."""
    with suppress(OSError):
        _file().chmod(0o600)


def _file() -> Path:
    """Where Ray writes a token of its own."""
    return Path.home() / ".ray" / "auth_token"
