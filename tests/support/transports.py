"""Transports that a test takes as a parameter."""

from importlib.util import find_spec

import pytest


def skip_without(transport: str) -> None:
    """Skips the test if a package that the transport needs is not installed."""
    if transport == "nixl" and find_spec("nixl") is None:
        pytest.skip("nixl is not installed; pip install 'tandem-serve[nixl]'")
