"""What layers keep as a recurrent state, and what they give to it."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StateShape(ABC):
    """The sizes of a state, whose class says by which rule tokens change it. Kernels have a table of these classes.

    tail: how many inputs of earlier tokens the convolution takes, which comes before the rule.
    """

    tail: int

    divisor: ClassVar[tuple[str, str]]
    """Two fields, of which the first divides the second: heads of the one serve several of the other."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """What a token gives to the convolution."""

    @property
    @abstractmethod
    def state(self) -> tuple[int, int, int]:
        """[heads, rows, columns]."""

    @property
    @abstractmethod
    def output_dim(self) -> int:
        """What a token reads from the state of one head."""

    @property
    def heads(self) -> int:
        return self.state[0]

    @property
    def decays(self) -> tuple[int, ...]:
        """[heads], what a token lets each state decay by."""
        return (self.heads,)

    @property
    def numbers(self) -> int:
        """Of an entry: the tail [tail, channels], then the state."""
        return self.tail * self.channels + math.prod(self.state)


@dataclass(frozen=True, kw_only=True)
class DeltaShape(StateShape):
    """Of a gated delta rule (Yang et al., arXiv 2412.06464). A key head serves as many value heads as there are of them
    for each. A token gives q, k and v of all heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    divisor = "key_heads", "value_heads"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def output_dim(self) -> int:
        return self.value_dim


@dataclass(frozen=True, kw_only=True)
class KdaShape(DeltaShape):
    """Of Kimi Delta Attention (arXiv 2510.26692): as DeltaShape, but each row of a state has a decay of its own."""

    @property
    def decays(self) -> tuple[int, ...]:
        """[heads, rows]."""
        return self.value_heads, self.key_dim


@dataclass(frozen=True, kw_only=True)
class SsdShape(StateShape):
    """Of Mamba-2, whose rule is state-space duality (Dao and Gu, arXiv 2405.21060). The heads of a group share B and C.
    A token gives x of all heads, then B and C of all groups."""

    num_heads: int
    groups: int
    head_dim: int
    state_size: int

    divisor = "groups", "num_heads"

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.groups * self.state_size

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size

    @property
    def output_dim(self) -> int:
        return self.head_dim


class RecurrentInputs(NamedTuple):
    """Of a state behind a causal convolution, for T new tokens.

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
        """Those of some tokens."""
        return self._replace(mixed=self.mixed[rows], log_decay=self.log_decay[rows], strength=self.strength[rows])
