"""What the kernels of chunks keep from one kernel of a layer to the next. Needs no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.torch.delta_rule import CHUNK


class Scratch(NamedTuple):
    """Of m chunks and H value heads; K and V are the padded columns of a key and a value. Rows of no token are 0. In
    the dtype of the model, but for `since` and `until`, which are float32.

    mixed: [m, …], behind the convolution: q and k [key_heads, CHUNK, K] each, v [H, CHUNK, V]. w: [m, H, CHUNK, K].
    added: [m, H, V, CHUNK], u, then what the tokens add to the state. scores: [m, H, CHUNK, CHUNK]. states: [m, H, V,
    K], before each chunk. since: [m, H, CHUNK], the part of that state which is left behind a token. until: likewise,
    the part of what a token adds which is left behind the chunk.
    """

    mixed: Tensor
    w: Tensor
    added: Tensor
    scores: Tensor
    states: Tensor
    since: Tensor
    until: Tensor

    @classmethod
    def of(cls, num_chunks: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> "Scratch":
        """Not filled."""
        keys, values, each = heads.keys, heads.values, (num_chunks, heads.value_heads)
        mixed = num_chunks, CHUNK * (2 * heads.key_heads * keys + heads.value_heads * values)
        sizes = mixed, *((*each, *of) for of in ((CHUNK, keys), (values, CHUNK), (CHUNK, CHUNK), (values, keys)))
        of_model = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        return cls(*of_model, *(torch.empty((*each, CHUNK), dtype=torch.float32, device=device) for _ in range(2)))


def most_chunks(num_tokens: int, num_sequences: int) -> int:
    """Of a forward. Each sequence may have a chunk that is not full, and two more of those before snapshots."""
    return num_tokens // CHUNK + 3 * min(num_sequences, num_tokens)
