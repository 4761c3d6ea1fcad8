"""Factors as callers give them: kernels compute with them, and with their reciprocals, in float32."""

import numpy as np

from tandem.cache.errors import InvalidArgument

LEAST, MOST = 2.0**-126, 2.0**126  # normal numbers of float32, whose reciprocals are too


def check_factor(name: str, value: object) -> None:
    """InvalidArgument, which calls it `name`, unless value is a number from LEAST to MOST."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not LEAST <= value <= MOST:
        raise InvalidArgument(f"{name} is {value!r}; a number from {LEAST:.2g} to {MOST:.2g} is accepted")
