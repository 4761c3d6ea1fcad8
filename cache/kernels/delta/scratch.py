"""Intermediate results that the chunk kernels of a layer pass on. Needs no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.torch.delta_rule import CHUNK


class Scratch(NamedTuple):
    """Scratch memory for m chunks and H value heads. K and V are the padded sizes of a key and a value. Rows without a
    token are 0. since and until are float32, the others have the model's dtype.

    mixed: [m, …], after the convolution: q and k [key_heads, CHUNK, K] each, v [H, CHUNK, V].
    w: [m, H, CHUNK, K]; empty without a delta rule.
    added: [m, H, V, CHUNK], u: the values less the chunk's own products.
    scores: [m, H, CHUNK, CHUNK].
    since: [m, H, CHUNK], how much of the state before the chunk remains after each token; if rows decay separately,
    [m, H, K], how much remains after the chunk.
    until: [m, H, CHUNK], how much of each token's addition remains after the chunk; empty if rows decay separately.
    """

    mixed: Tensor
    w: Tensor
    added: Tensor
    scores: Tensor
    since: Tensor
    until: Tensor

    @classmethod
    def of(cls, num_chunks: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> "Scratch":
        """Allocates tensors without values."""
        keys, values, each = heads.keys, heads.values, (num_chunks, heads.value_heads)
        mixed = num_chunks, CHUNK * (2 * heads.key_heads * keys + heads.value_heads * values)
        w, since, until = CHUNK * heads.is_delta, keys if heads.by_row else CHUNK, 0 if heads.by_row else CHUNK
        sizes = mixed, *((*each, *of) for of in ((w, keys), (values, CHUNK), (CHUNK, CHUNK)))
        of_model = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
        exact = (torch.empty((*each, size), dtype=torch.float32, device=device) for size in (since, until))
        return cls(*of_model, *exact)


def most_chunks(num_tokens: int, num_sequences: int) -> int:
    """The most chunks of a forward. Each sequence may have up to three short chunks: two before snapshots, and its
    last."""
    return num_tokens // CHUNK + 3 * min(num_sequences, num_tokens)
