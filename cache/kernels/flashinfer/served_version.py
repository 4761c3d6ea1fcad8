"""Refuses versions of FlashInfer that do not work. Imports neither FlashInfer nor torch."""

from importlib.metadata import PackageNotFoundError, version

SERIES = "0.6"  # docs/decisions/0178-refuse-flashinfer-0-7-until-a-gpu-has-run-it.md: what 0.7 does otherwise


def refused_version() -> str:
    """Why the installed FlashInfer does not serve, and how to install one that does; empty where it serves or none is
    installed."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return ""
    if found.startswith(f"{SERIES}."):
        return ""
    return f"flashinfer-python is {found}; it must be {SERIES}: pip install 'flashinfer-python=={SERIES}.*'"
