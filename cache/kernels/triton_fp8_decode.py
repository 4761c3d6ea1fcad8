"""Attention of single queries over a paged pool of 8-bit entries, in two Triton kernels.

Each sequence's positions are cut into splits, and a program attends for the queries of one KV head to one split; then
the splits are merged by log-sum-exp (Flash-Decoding; Dao et al., 2023). Entries are widened to float16, which holds
each of them exactly, and queries become float16 divided by their largest element.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.dependent_launch import launch_options

PROGRAMS = 2048  # in all, from which splitting further does not pay
MOST_SPLITS = 64
POSITIONS = 64  # a program reads at a time
WARPS, STAGES = 4, 3


def attend_fp8(
    pool: Tensor,
    layer: int,
    q: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    scales: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """o [B, num_q_heads, head_dim] of one query each of B sequences, the last of the positions on its pages.

    pool: [num_pages, layers, 2, num_kv_heads, page_size, head_dim], float8_e4m3fn, contiguous. q [B, num_q_heads,
    head_dim], any strides but 1 in the last. scales: float32 [2, num_kv_heads], of K and V. The page tables are
    FlashInfer's, int32, on the device. scale, window, softcap: see KernelFactory; sinks: [num_q_heads].
    """
    batch, num_q_heads, head_dim = q.shape
    _, layers, _, num_kv_heads, page_size, _ = pool.shape
    group = num_q_heads // num_kv_heads
    splits = min(MOST_SPLITS, triton.next_power_of_2(max(1, PROGRAMS // (batch * num_kv_heads))))
    partial = torch.empty((batch, num_q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, num_q_heads, splits), dtype=torch.float32, device=q.device)
    output = torch.empty((batch, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    options = launch_options(pool.device)
    kernel: Any = _attend_split[(num_kv_heads, splits, batch)]
    kernel(
        *(q, pool, kv_indptr, kv_indices, kv_last_page_len, scales, partial, lse),
        *(q.stride(0), q.stride(1)),
        layers * 2 * num_kv_heads * page_size * head_dim,
        layer * 2 * num_kv_heads * page_size * head_dim,
        num_kv_heads,
        scale,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        GROUP=group,
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        POSITIONS=POSITIONS,
        SPLITS=splits,
        SOFTCAP=softcap is not None,
        WINDOW=window is not None,
        **options,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    merge: Any = _merge_splits[(num_q_heads, batch)]
    merge(
        *(partial, lse, scales, sinks, output),
        num_q_heads,
        num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        SINKS=sinks is not None,
        **options,
        num_warps=1,
    )
    return output


@triton.jit
def _attend_split(
    q, pool, kv_indptr, kv_indices, kv_last_page_len, scales, partial, lse,
    q_token, q_head, page_elements, layer_elements, num_kv_heads, scale, softcap, window,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_page = tl.load(kv_indptr + sequence)
    length = (tl.load(kv_indptr + sequence + 1) - first_page - 1) * PAGE_SIZE + tl.load(kv_last_page_len + sequence)
    share = tl.cdiv(tl.cdiv(length, POSITIONS), SPLITS) * POSITIONS
    begin = split * share
    end = tl.minimum(begin + share, length)

    row, dim = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    there = row < GROUP
    q_heads = head * GROUP + row
    places = sequence.to(tl.int64) * q_token + q_heads[:, None] * q_head + dim[None, :]
    queries = tl.load(q + places, mask=there[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(queries), 1), 1e-30)
    queries = (queries / largest[:, None]).to(tl.float16)
    factor = largest * (scale * tl.load(scales + head))

    keys = pool + layer_elements + head * (PAGE_SIZE * HEAD_DIM)
    values = keys + num_kv_heads * (PAGE_SIZE * HEAD_DIM)
    highest = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    output = tl.zeros([GROUP_BLOCK, HEAD_DIM], tl.float32)
    for start in range(begin, end, POSITIONS):
        position = start + tl.arange(0, POSITIONS)
        inside = position < end
        page = tl.load(kv_indices + first_page + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        slot = page * page_elements + position % PAGE_SIZE * HEAD_DIM
        k = tl.load(keys + slot[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(queries, k.to(tl.float16)) * factor[:, None]
        if SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        seen = inside
        if WINDOW:
            seen = seen & (position >= length - window)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(tl.maximum(highest, tl.max(scores, 1)), -1e30)
        weights = tl.exp(scores - now[:, None])
        fade = tl.exp(highest - now)
        v = tl.load(values + slot[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        output = tl.dot(weights.to(tl.float16), v.to(tl.float16), output * fade[:, None])
        weight = weight * fade + tl.sum(weights, 1)
        highest = now

    place = (sequence.to(tl.int64) * (num_kv_heads * GROUP) + q_heads) * SPLITS + split
    some = weight > 0  # not so where a split has no position, or none in the window
    weight = tl.where(some, weight, 1.0)
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], output / weight[:, None], mask=there[:, None])
    tl.store(lse + place, tl.where(some, highest + tl.log(weight), -float("inf")), mask=there)


@triton.jit
def _merge_splits(
    partial, lse, scales, sinks, output, num_q_heads, num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    place = (sequence * num_q_heads + head) * SPLITS + split
    logs = tl.load(lse + place)
    highest = tl.max(logs, 0)
    weights = tl.exp(logs - highest)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - highest)
    parts = tl.load(partial + place[:, None] * HEAD_DIM + dim[None, :])
    merged = tl.fdiv(tl.sum(parts * weights[:, None], 0), total) * tl.load(scales + num_kv_heads + head // GROUP)
    tl.store(output + (sequence * num_q_heads + head) * HEAD_DIM + dim, merged.to(output.dtype.element_ty))
