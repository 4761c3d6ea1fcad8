"""Sizes of grids and blocks. Triton's own functions have other types from version to version."""


def cdiv(size: int, part: int) -> int:
    """Returns the number of parts that hold `size`."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()
