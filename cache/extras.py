"""How a user installs what tandem needs for some things only."""


def install(*extras: str) -> str:
    """The command, typed in a checkout. A package index may have another project of tandem's name."""
    return " or ".join(f"pip install -e '.[{extra}]'" for extra in extras)
