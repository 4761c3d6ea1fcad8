"""Integers as callers give them: numpy would take 1.5 for 1, and True is one too."""

import reprlib
from typing import Any

import numpy as np

from tandem.cache.errors import InvalidArgument
from tandem.cache.window import Int64Array

MOST = np.iinfo(np.int64).max


def integer(name: str, value: object, least: int | None = None) -> int:
    """value as an int. InvalidArgument, which calls it `name`, unless it is one, of Python's or numpy's, and not below
    `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidArgument(f"{name} is {value!r}; an integer is accepted")
    if least is not None and value < least:
        raise InvalidArgument(f"{name} is {value}; it must be at least {least}")
    return int(value)


def integers(name: str, values: Any) -> Int64Array:
    """values, a sequence or an array, as int64 [n]. InvalidArgument, which calls them `name`, unless all are integers
    that fit."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unlike lengths
        array = np.empty((0, 0))
    too_large = array.dtype == np.uint64 and array.size and int(array.max()) > MOST
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or too_large:
        raise InvalidArgument(f"{name} is {reprlib.repr(values)}; a row of integers of 64 bits is accepted")
    return array.astype(np.int64, copy=False)


def checked_reach(num_tokens: int, longest_append: int | None) -> tuple[int, int]:
    """Both as ints ≥ 0, see PagedKVCache.reserve; longest_append None is num_tokens."""
    reach = integer("num_tokens", num_tokens, least=0)
    return reach, reach if longest_append is None else integer("longest_append", longest_append, least=0)
