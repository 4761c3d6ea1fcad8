"""What layers keep as a recurrent state, and what they give to it."""

from typing import NamedTuple

from torch import Tensor


class DeltaShape(NamedTuple):
    """Of the heads, and how many inputs of earlier tokens the convolution takes. A key head serves as many value heads
    as there are of them for each."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tail: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def numbers(self) -> int:
        """Of an entry: the tail [tail, channels], then the state [value_heads, key_dim, value_dim]."""
        return self.tail * self.channels + self.value_heads * self.key_dim * self.value_dim


class DeltaInputs(NamedTuple):
    """Of a gated delta rule (Yang et al., arXiv 2412.06464) behind a causal convolution, for T new tokens.

    mixed: [T, 2 · key_heads · key_dim + value_heads · value_dim], q, k and v of all heads before the convolution.
    conv: [channels, taps], its weights in the dtype of `mixed`; the last tap is of the token itself. log_decay: float32
    [T, value_heads], at most 0. beta: [T, value_heads], how much of the state a token replaces.
    """

    mixed: Tensor
    conv: Tensor
    log_decay: Tensor
    beta: Tensor
