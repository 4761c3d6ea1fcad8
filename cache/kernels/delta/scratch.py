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
    added: [m, H, V, CHUNK], u, the values behind the chunk's own products. scores: [m, H, CHUNK, CHUNK]. since: [m,
    H, CHUNK], the part of the state before the chunk that is left behind a token; where rows decay by themselves [m, H,
    K], that behind the chunk. until: [m, H, CHUNK], the part of what a token adds that is left behind the chunk.
    Without a delta rule w has no number, and until none where rows decay by themselves.
    """

    mixed: Tensor
    w: Tensor
    added: Tensor
    scores: Tensor
    since: Tensor
    until: Tensor

    @classmethod
    def of(cls, num_chunks: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> "Scratch":
        """Not filled."""
        keys, values, each = heads.keys, heads.values, (num_chunks, heads.value_heads)
        mixed = num_chunks, CHUNK * (2 * heads.key_heads * keys + heads.value_heads * values)
        w, since, until = CHUNK * heads.is_delta, keys if heads.by_row else CHUNK, 0 if heads.by_row else CHUNK
        sizes = mixed, *((*each, *of) for of in ((w, keys), (values, CHUNK), (CHUNK, CHUNK)))
        of_model = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        exact = (torch.empty((*each, size), dtype=torch.float32, device=device) for size in (since, until))
        return cls(*of_model, *exact)


def most_chunks(num_tokens: int, num_sequences: int) -> int:
    """Of a forward. Each sequence may have a chunk that is not full, and two more of those before snapshots."""
    return num_tokens // CHUNK + 3 * min(num_sequences, num_tokens)
