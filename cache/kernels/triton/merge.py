"""Attention to a sequence's own pages and to those that it shares, made one: a Triton kernel."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options

HEADS_PER_PROGRAM = 8


Part = tuple[Tensor, Tensor | None]
"""o [n, H, D] over some keys; the log-sum-exps of their scores, float32 [n, H], of base 2 as FlashInfer gives them."""


def merge_parts(of_own: Part, of_shared: Part, begins: Tensor, found_in: Tensor, sinks: Tensor | None) -> Tensor:
    """o of of_own, with rows found_in[begins[i]] … found_in[begins[i + 1] - 1] of of_shared added to row i; in place.

    begins: int32 [n + 1]; found_in: int32. sinks: [H], learned logits (of base e) that count in each softmax. All are
    contiguous.
    """
    own, own_lse = of_own
    shared, shared_lse = of_shared
    assert own_lse is not None
    assert shared_lse is not None
    num_rows, num_heads, head_dim = own.shape
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    kernel: Any = _merge[(num_rows, cdiv(num_heads, heads))]
    kernel(
        *(own, own_lse, shared, shared_lse, begins, found_in, own_lse if sinks is None else sinks),
        *(num_heads, head_dim, heads, next_power_of_2(head_dim)),
        SINKS=sinks is not None,
        **launch_options(own.device),
    )
    return own


@triton.jit
def _merge(
    own, own_lse, shared, shared_lse, begins, found_in, sinks,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program some heads of a row. Sums are kept relative to the largest log-sum-exp so far (online softmax)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    is_head = head < HEADS
    element = head[:, None] * HEAD_DIM + tl.arange(0, BLOCK)[None, :]
    there = is_head[:, None] & (tl.arange(0, BLOCK) < HEAD_DIM)[None, :]
    top = tl.load(own_lse + row * HEADS + head, mask=is_head, other=0.0)
    total = tl.full((HEADS_BLOCK,), 1.0, tl.float32)
    output = tl.load(own + row * HEADS * HEAD_DIM + element, mask=there).to(tl.float32)
    for index in range(tl.load(begins + row), tl.load(begins + row + 1)):
        part_row = tl.load(found_in + index).to(tl.int64)
        lse = tl.load(shared_lse + part_row * HEADS + head, mask=is_head, other=0.0)
        part = tl.load(shared + part_row * HEADS * HEAD_DIM + element, mask=there).to(tl.float32)
        larger = tl.maximum(top, lse)
        kept, added = tl.exp2(top - larger), tl.exp2(lse - larger)
        output = output * kept[:, None] + part * added[:, None]
        total = total * kept + added
        top = larger
    if SINKS:
        total += tl.exp2(tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634 - top)
    tl.store(own + row * HEADS * HEAD_DIM + element, (output / total[:, None]).to(own.dtype.element_ty), mask=there)
