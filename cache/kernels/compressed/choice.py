"""Chooses the kernels for compressed KV by token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.kernels.compressed import reference


@dataclass(frozen=True)
class TokenKernels:
    """The kernels whose references are in reference.py."""

    rotate_and_append: Callable[..., tuple[Tensor, Tensor]]
    rotate_queries: Callable[..., Tensor]
    compress_and_append: Callable[..., Tensor]
    choose_entries: Callable[..., Tensor]
    attend: Callable[..., Tensor]


REFERENCE = TokenKernels(
    reference.rotate_and_append,
    reference.rotate_neighbours,
    reference.compress_and_append,
    reference.choose_entries,
    reference.attend,
)


def choose_token_kernels(device: torch.device) -> TokenKernels:
    """Chooses Triton's kernels on a GPU, else torch's."""
    if device.type != "cuda":
        return REFERENCE
    from tandem.cache.kernels.compressed.attend import attend  # needs triton
    from tandem.cache.kernels.compressed.choose import choose_entries
    from tandem.cache.kernels.compressed.compress import compress_and_append
    from tandem.cache.kernels.compressed.rotate import rotate_and_append, rotate_queries

    return TokenKernels(rotate_and_append, rotate_queries, compress_and_append, choose_entries, attend)
