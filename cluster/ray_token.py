"""The token that Ray asks for. Nothing here imports Ray, which reads its environment when it is imported."""

import os
from contextlib import suppress
from pathlib import Path

GIVEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def show_token() -> None:
    """Before Ray is imported: it shows the token that this user has, as it does by itself to a Ray that it has started
    or found, to one at a given address too. RAY_AUTH_MODE decides where it is set."""
    if _file().exists() or any(name in os.environ for name in GIVEN):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def hide_token() -> None:
    """From other users: Ray leaves its file readable for everybody."""
    with suppress(OSError):
        _file().chmod(0o600)


def _file() -> Path:
    """Where Ray writes a token of its own."""
    return Path.home() / ".ray" / "auth_token"
