"""The token that Ray asks for. This file does not import Ray, which reads its environment when it is imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GIVEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def token_shown() -> Iterator[None]:
    """A Ray that is imported within shows this user's token to a Ray at a given address, too.

    By itself it does so only to a Ray that it has started or found. RAY_AUTH_MODE decides where it is set.
    """
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
    """Makes Ray's token file private: Ray leaves it readable for everybody."""
    with suppress(OSError):
        _file().chmod(0o600)


def _file() -> Path:
    """The file of Ray's own token."""
    return Path.home() / ".ray" / "auth_token"
