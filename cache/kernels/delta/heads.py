"""How kernels find the heads of a recurrent state in what tokens give. Needs no Triton."""

from typing import NamedTuple

from tandem.cache.kernels.recurrent import DeltaShape, StateShape

LEAST = 32  # columns of a product: with 16, Triton 3.6's for 16 bits gave NaN on Hopper


class Heads(NamedTuple):
    """Sizes, and at which channels the queries, keys and values of all heads begin."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tail: int
    query_at: int
    key_at: int
    value_at: int

    @classmethod
    def of(cls, shape: StateShape) -> "Heads":
        assert isinstance(shape, DeltaShape), "no other rule has kernels"
        queries, keys = shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim
        sizes = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tail
        return cls(*sizes, 0, queries, keys)

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

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
