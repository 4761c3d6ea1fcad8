"""How a user installs what tandem needs for some things only."""

DISTRIBUTION = "tandem-serve"  # on a package index, where `tandem` is another project; the import name is tandem


def install(*extras: str) -> str:
    """The command. Of an installed tandem, from a wheel or a checkout, it changes nothing but adds what is missing."""
    return " or ".join(f"pip install '{DISTRIBUTION}[{extra}]'" for extra in extras)
