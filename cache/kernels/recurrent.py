"""What a layer gives to a recurrent state."""

from typing import NamedTuple

from torch import Tensor


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
