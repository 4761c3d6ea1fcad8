"""The recurrent states that layers keep, and the inputs that update them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from tandem.cache.plan.shard import HeldNumbers, Shard

HeadParts = tuple[tuple[str, int], ...]
"""Parts of a row of numbers: the field of a StateShape that counts the part's heads, and the numbers of each head."""


@dataclass(frozen=True, kw_only=True)
class StateShape(ABC):
    """The sizes of a state. The class gives the rule by which tokens change it, and kernels have a table of classes.

    tail: the number of earlier tokens' inputs that the convolution takes. It comes before the rule.
    """

    tail: int

    divisor: ClassVar[tuple[str, str]]
    """Two fields. The first divides the second: each of its heads serves several of the second's."""

    sides: ClassVar[tuple[str, str]]
    """Two fields, the rows and columns of a state."""

    @property
    @abstractmethod
    def channel_parts(self) -> HeadParts:
        """The heads that a token gives to the convolution, by their parts."""

    @property
    def channels(self) -> int:
        return sum(getattr(self, field) * each for field, each in self.channel_parts)

    @property
    @abstractmethod
    def state(self) -> tuple[int, int, int]:
        """[heads, rows, columns]."""

    @property
    @abstractmethod
    def output_dim(self) -> int:
        """The number of values that a token reads from the state of one head."""

    @property
    def heads(self) -> int:
        return self.state[0]

    @property
    def decays(self) -> tuple[int, ...]:
        """[heads], what a token lets each state decay by."""
        return (self.heads,)

    @property
    def numbers(self) -> int:
        """The number of elements of an entry: the tail [tail, channels], then the state."""
        return self.tail * self.channels + math.prod(self.state)

    def sharers(self, shard: Shard) -> int:
        """How many ranks share a key head or a group once they divide this shape: 1 unless there are more ranks than
        these. InvalidArgument when the ranks cannot divide it."""
        few = self.divisor[0]
        return shard.replicas(f"{few} of recurrent layers", getattr(self, few))

    def divided(self, shard: Shard) -> Self:
        """The shape of a rank, which has some heads and the key heads or groups that serve them. InvalidArgument when
        the ranks cannot divide it."""
        few, many = self.divisor
        serving = len(shard.kv_heads(f"{few} of recurrent layers", getattr(self, few)))
        return replace(self, **{few: serving, many: len(shard.part(f"{many} of recurrent layers", self.heads))})

    def undivided(self, shard: Shard, sharers: int) -> Self:
        """Returns the shape from which divided() made this one. sharers: the result of that shape's sharers()."""
        few, many = self.divisor
        serving = getattr(self, few) * (shard.size // sharers)
        return replace(self, **{few: serving, many: self.heads * shard.size})

    def held(self, parts: HeadParts, shard: Shard, sharers: int) -> Iterator[HeldNumbers]:
        """Yields the numbers that a rank with this shape holds among the numbers of all ranks, a run for each of
        `parts`."""
        begin = whole = 0
        for field, each in parts:
            count, ranks = getattr(self, field) * each, sharers if field == self.divisor[0] else 1
            yield HeldNumbers(begin, whole + shard.rank // ranks * count, count, ranks)
            begin, whole = begin + count, whole + shard.size // ranks * count

    def held_of_entry(self, shard: Shard, sharers: int) -> Iterator[HeldNumbers]:
        """Yields the runs of an entry's numbers that a rank holds, see held()."""
        of_all = self.undivided(shard, sharers)
        for row in range(self.tail):
            for one in self.held(self.channel_parts, shard, sharers):
                begin, whole = row * self.channels + one.begin, row * of_all.channels + one.whole
                yield HeldNumbers(begin, whole, one.count, one.sharers)
        numbers = math.prod(self.state)
        before, before_all = self.tail * self.channels, self.tail * of_all.channels
        yield HeldNumbers(before, before_all + shard.rank * numbers, numbers)


@dataclass(frozen=True, kw_only=True)
class DeltaShape(StateShape):
    """The state of a gated delta rule (Yang et al., arXiv 2412.06464). Each key head serves value_heads / key_heads
    value heads. A token gives q, k and v of all heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    divisor = "key_heads", "value_heads"
    sides = "key_dim", "value_dim"

    @property
    def channel_parts(self) -> HeadParts:
        keys = "key_heads", self.key_dim
        return keys, keys, ("value_heads", self.value_dim)

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def output_dim(self) -> int:
        return self.value_dim


@dataclass(frozen=True, kw_only=True)
class KdaShape(DeltaShape):
    """The state of Kimi Delta Attention (arXiv 2510.26692). It is a DeltaShape in which each row of a state has its own
    decay."""

    @property
    def decays(self) -> tuple[int, ...]:
        """[heads, rows]."""
        return self.value_heads, self.key_dim


@dataclass(frozen=True, kw_only=True)
class SsdShape(StateShape):
    """The state of Mamba-2, whose rule is state-space duality (Dao and Gu, arXiv 2405.21060). The heads of a group
    share B and C. A token gives x of all heads, then B and C of all groups."""

    num_heads: int
    groups: int
    head_dim: int
    state_size: int

    divisor = "groups", "num_heads"
    sides = "head_dim", "state_size"

    @property
    def channel_parts(self) -> HeadParts:
        of_groups = "groups", self.state_size
        return ("num_heads", self.head_dim), of_groups, of_groups

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size

    @property
    def output_dim(self) -> int:
        return self.head_dim


class RecurrentInputs(NamedTuple):
    """What T new tokens give to a state after a causal convolution.

    mixed: [T, channels], the heads as StateShape says, before the convolution. conv: [channels, taps], its weights in
    the dtype of `mixed`; the last tap is of the token itself. log_decay: float32 [T, *decays], at most 0. strength:
    float32 [T, heads], by what a token is written into the state: the beta of a delta rule, Δ of Mamba-2. conv_bias:
    [channels], as `conv`. skip: float32 [heads], by what Mamba-2 adds x to the output, its D.
    """

    mixed: Tensor
    conv: Tensor
    log_decay: Tensor
    strength: Tensor
    conv_bias: Tensor | None = None
    skip: Tensor | None = None

    def of(self, rows: Tensor | slice) -> "RecurrentInputs":
        """Returns the inputs of some tokens."""
        return self._replace(mixed=self.mixed[rows], log_decay=self.log_decay[rows], strength=self.strength[rows])
