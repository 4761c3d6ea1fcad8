"""Scores of positions by their index keys: a Triton kernel, which computes what score() of torch/index.py does."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.kv_scales import Fp8Rows

POSITIONS_PER_TILE = 64
LEAST = 16  # rows and columns of a tensor core's tile
PROGRAMS = 512  # that share the positions of few tokens


@dataclass(frozen=True, eq=False)
class SeenPages:
    """The positions that n tokens see: 0 … lengths[i] - 1 (int32 [n]), in pages that begin at kv_indices[firsts[i]]
    (firsts: int32 [n], kv_indices: int32)."""

    lengths: Tensor
    firsts: Tensor
    kv_indices: Tensor

    def between(self, begin: int, end: int) -> "SeenPages":
        """Returns the pages of tokens begin … end - 1."""
        return SeenPages(self.lengths[begin:end], self.firsts[begin:end], self.kv_indices)


def score_positions(
    pool: Tensor, layer: int, q: Tensor, weights: Tensor, seen: SeenPages, longest: int, fp8: Fp8Rows | None = None
) -> Tensor:
    """float32 [n, longest], of row i the first lengths[i]: Σ over heads of weight · max(q · key, 0).

    pool: [num_pages, layers, 1, 1, page_size, D], contiguous; fp8: how one of 8 bits has the keys, with one scale each.
    q [n, heads, D], a token's heads any distance apart;
    weights float32 [n, heads], contiguous. longest: at least all lengths.
    """
    num_tokens, num_heads, width = q.shape
    scores = torch.empty((num_tokens, longest), dtype=torch.float32, device=pool.device)
    shares = min(cdiv(longest, POSITIONS_PER_TILE), max(1, PROGRAMS // num_tokens))
    kernel: Any = _score[(num_tokens, shares)]
    kernel(
        *(q, weights, pool, seen.lengths, seen.firsts, seen.kv_indices, scores),
        *(q.stride(0), q.stride(1), pool.stride(0), layer * pool.stride(1), longest, num_heads),
        *(max(LEAST, next_power_of_2(num_heads)), width, max(LEAST, next_power_of_2(width))),
        *(pool.shape[4], pool.shape[5], POSITIONS_PER_TILE, fp8 is not None),
        **launch_options(pool.device),
    )
    return scores


@triton.jit(do_not_specialize=["longest"])
def _score(
    q, weights, pool, lengths, firsts, kv_indices, scores,
    q_token, q_head, page_elements, layer_elements, longest, num_heads,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr, ROW: tl.constexpr,
    KEYS: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has every so many tiles of the positions of one token, and all heads, for which it reads keys once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    q_rows = q + token * q_token + head[:, None] * q_head
    queries = tl.load(q_rows + column[None, :], mask=(head < num_heads)[:, None] & in_width[None, :], other=0.0)
    weight = tl.load(weights + token * num_heads + head, mask=head < num_heads, other=0.0)
    length, pages = tl.load(lengths + token), kv_indices + tl.load(firsts + token)
    for begin in range(tl.program_id(1) * KEYS, length, tl.num_programs(1) * KEYS):
        position = begin + tl.arange(0, KEYS)
        inside = position < length
        page = tl.load(pages + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        rows = pool + page * page_elements + layer_elements + (position % PAGE_SIZE) * ROW
        keys = tl.load(rows[:, None] + column[None, :], mask=inside[:, None] & in_width[None, :], other=0.0)
        if FP8:
            keys = keys.to(tl.float32).to(queries.dtype)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        found = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        if FP8:  # scales are positive, so that they may be multiplied in after the maximum
            found *= tl.load((rows + WIDTH).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)
        tl.store(scores + token * longest + position, found, mask=inside)
