"""Finds the heads of a recurrent state in a token's channels. Needs no Triton."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, SsdShape, StateShape

LEAST = 64  # columns of a product: with 16 and with 32, Triton 3.6's for 16 bits gave NaN on Hopper


class Heads(NamedTuple):
    """Sizes, the first channels of all queries, keys and values, and the update rule.

    In Mamba-2, C are the queries, B the keys and x the values. is_delta: the rule subtracts what the key reads from a
    token's value, and queries and keys have unit length. by_row: each row of a state (one key dimension) has its own
    decay.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tail: int
    query_at: int
    key_at: int
    value_at: int
    is_delta: bool
    by_row: bool

    @classmethod
    def of(cls, shape: StateShape) -> "Heads":
        return FINDERS[type(shape)](shape)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_at(self) -> int:
        """The offset of the states in an entry."""
        return self.tail * self.channels

    @property
    def scale(self) -> float:
        """The factor of queries."""
        return self.key_dim**-0.5 if self.is_delta else 1.0

    @property
    def decays(self) -> int:
        """Decays of a token, for all heads."""
        return self.value_heads * (self.key_dim if self.by_row else 1)

    @property
    def keys(self) -> int:
        """Columns of a key in products."""
        return padded(self.key_dim)

    @property
    def values(self) -> int:
        """Columns of a value in products."""
        return padded(self.value_dim)


def padded(dim: int) -> int:
    return max(1 << (dim - 1).bit_length(), LEAST)


def _of_delta_rule(shape: DeltaShape) -> Heads:
    sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tail
    keys = shape.key_heads * shape.key_dim
    return Heads(*sizes, 0, keys, 2 * keys, is_delta=True, by_row=False)


def _of_rows(shape: DeltaShape) -> Heads:
    return _of_delta_rule(shape)._replace(by_row=True)


def _of_duality(shape: SsdShape) -> Heads:
    values, keys = shape.num_heads * shape.head_dim, shape.groups * shape.state_size
    sizes = shape.groups, shape.num_heads, shape.state_size, shape.head_dim, shape.tail
    return Heads(*sizes, values + keys, values, 0, is_delta=False, by_row=False)


FINDERS: Mapping[type[StateShape], Callable[[Any], Heads]] = MappingProxyType(
    {DeltaShape: _of_delta_rule, KdaShape: _of_rows, SsdShape: _of_duality}
)
