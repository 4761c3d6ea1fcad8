"""Paths in a configuration."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from tandem.cluster.config.model import usable_path


def _resolve(path: str) -> str:
    """Makes the path absolute: workers do not share the caller's working directory."""
    return str(Path(usable_path(path)).expanduser().resolve())


ResolvedPath = Annotated[str, AfterValidator(_resolve)]
