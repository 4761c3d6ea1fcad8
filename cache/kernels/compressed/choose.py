"""Compressed entries by their index keys: the Triton kernels that choose positions, over entries."""

from torch import Tensor

from tandem.cache.kernels.compressed.tokens import TokenPages
from tandem.cache.kernels.triton.index_scores import SeenPages, score_positions
from tandem.cache.kernels.triton.top_k import choose_top


def choose_entries(
    keys: tuple[Tensor, int, TokenPages], q: Tensor, weights: Tensor, visible: Tensor, top_k: int, longest: int
) -> Tensor:
    """See reference.py. No page of entries was dropped, so begins are all 0."""
    pool, layer, pages = keys
    seen = SeenPages(visible, pages.firsts, pages.kv_indices)
    return choose_top(score_positions(pool, layer, q, weights, seen, longest), visible, top_k)
