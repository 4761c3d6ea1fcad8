"""What the kernels of chunks keep from one kernel of a layer to the next. Needs no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import StateShape
from tandem.cache.kernels.torch.delta_rule import CHUNK


class Scratch(NamedTuple):
    """Of T tokens, Hv value heads, in the dtype of the model: mixed [T, channels], q, k and v behind the convolution;
    w [T, Hv, key_dim], u [T, Hv, value_dim] and scores [T, Hv, CHUNK] of a token's chunk. totals: float32 [T, Hv]."""

    mixed: Tensor
    w: Tensor
    u: Tensor
    scores: Tensor
    totals: Tensor

    @classmethod
    def of(cls, num_tokens: int, shape: StateShape, dtype: torch.dtype, device: torch.device) -> "Scratch":
        """Not filled."""
        heads, (_, key_dim, value_dim) = (num_tokens, shape.heads), shape.state
        sizes = (num_tokens, shape.channels), *((*heads, width) for width in (key_dim, value_dim, CHUNK))
        mixed, w, u, scores = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        return cls(mixed, w, u, scores, torch.empty(heads, dtype=torch.float32, device=device))
