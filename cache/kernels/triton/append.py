"""Rotation of q and k, and K and V into the pages of this worker and of a peer, in one Triton kernel.

What it computes is what TorchKernels.append computes, but for rounding: it rotates in float32 and rounds once.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.fp8 import quantise
from tandem.cache.plan.rope import Rotation

HEADS_PER_PROGRAM = 8


@dataclass(frozen=True, eq=False)
class AppendTargets:
    """The slots that take T new tokens.

    slots: int32 [T], own slots, negative for a token that is not stored here. peer_rows: int64 [T], the address in a
    mapped pool of the row of head_dim elements that takes the K of layer 0, head 0, or 0 for a token that stays here;
    None where all stay.
    """

    slots: Tensor
    peer_rows: Tensor | None


def append(
    pool: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Rotation | None,
    targets: AppendTargets,
    *,
    keep_k: bool,
    fp8_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k rotated, both new; K and V of each token stand in one layer of its own slot, and of its peer's.

    pool: [num_pages, layers, 2, num_kv_heads, page_size, head_dim], contiguous. q [T, num_q_heads, head_dim], k and v
    [T, num_kv_heads, head_dim]: any strides but 1 in the last. keep_k False saves the copy of k and gives it back as
    it came, for callers that read it from the pages. Pools of peers have the shape of `pool` but for num_pages.
    fp8_factors: of a float8_e4m3fn pool, float32 [2, num_kv_heads], by which K and V are multiplied before they are
    rounded to its entries, saturated.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, _, _, num_kv_heads, page_size, _ = pool.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device) if keep_k else k
    rotary_dim = head_dim if rotation is None else rotation.cos.shape[-1]
    half_block = next_power_of_2(rotary_dim // 2)
    rest_block = next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 0
    cos, sin = (q, q) if rotation is None else (rotation.cos, rotation.signed_sin)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(max(num_q_heads, num_kv_heads)))
    q_parts, kv_parts = cdiv(num_q_heads, heads), cdiv(num_kv_heads, heads)
    kernel: Any = _append[(num_tokens * (q_parts + kv_parts),)]
    kernel(
        *(q, k, v, q_out, k_out, cos, sin, pool, targets.slots, targets.peer_rows, fp8_factors),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), sin.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), num_q_heads, num_kv_heads),
        *(q_parts + kv_parts, q_parts, page_size, heads, head_dim, rotary_dim // 2, half_block, rest_block),
        *(rotation is not None, keep_k, targets.peer_rows is not None, fp8_factors is not None),
        **launch_options(pool.device),
    )
    return q_out, k_out


@triton.jit
def _append(
    q, k, v, q_out, k_out, cos, sin, pool, slots, peer_rows, fp8_factors,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token,
    page_elements, layer_elements, num_q_heads, num_kv_heads,
    PARTS: tl.constexpr, Q_PARTS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr, KEEP_K: tl.constexpr, HAS_PEER: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has some heads of q, or of k and v, of one token; a token's programs are neighbours."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    cos += token * cos_token
    sin += token * sin_token
    if part < Q_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        there = heads < num_q_heads
        rows = q + token * q_token + heads * q_head
        queries = load_parts(rows, cos, sin, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, ROTATE)
        q_rows = q_out + (token * num_q_heads + heads) * HEAD_DIM
        store_parts(q_rows, queries, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
    else:
        heads = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)[:, None]
        there = heads < num_kv_heads
        rows = k + token * k_token + heads * k_head
        keys = load_parts(rows, cos, sin, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, ROTATE)
        rows = v + token * v_token + heads * v_head
        values = load_parts(rows, cos, sin, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, tl.constexpr(False))
        if KEEP_K:
            k_rows = k_out + (token * num_kv_heads + heads) * HEAD_DIM
            store_parts(k_rows, keys, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
        if FP8:
            entry: tl.constexpr = pool.dtype.element_ty
            keys = _quantised(keys, fp8_factors + heads, there, entry)
            values = _quantised(values, fp8_factors + num_kv_heads + heads, there, entry)
        slot = tl.load(slots + token)
        in_layer = layer_elements + heads * (PAGE_SIZE * HEAD_DIM)
        to_values = num_kv_heads * (PAGE_SIZE * HEAD_DIM)
        # A branch would take two registers more than the 32 with which a multiprocessor is full.
        here = heads < tl.where(slot >= 0, num_kv_heads, 0)
        own = pool + (slot // PAGE_SIZE).to(tl.int64) * page_elements + (slot % PAGE_SIZE) * HEAD_DIM + in_layer
        store_parts(own, keys, here, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
        store_parts(own + to_values, values, here, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
        if HAS_PEER:
            address = tl.load(peer_rows + token)
            if address != 0:
                # Without the hint the stores would be of one element each.
                peer = tl.multiple_of(address, 16).to(pool.dtype) + in_layer
                store_parts(peer, keys, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)
                store_parts(peer + to_values, values, there, HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK)


@triton.jit
def load_parts(
    rows, cos, sin, there,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
):  # fmt: skip
    """The parts of each row: elements 0 … HALF-1 and HALF … 2·HALF-1, rotated, and the rest; rows: pointers [n, 1]."""
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = there & (column < HALF)
    first = tl.load(rows + column, mask=inside)
    second = tl.load(rows + HALF + column, mask=inside)
    if ROTATE:
        x, y = first.to(tl.float32), second.to(tl.float32)
        in_row = column < HALF
        cos_x = tl.load(cos + column, mask=in_row).to(tl.float32)
        sin_x = tl.load(sin + column, mask=in_row).to(tl.float32)
        cos_y = tl.load(cos + HALF + column, mask=in_row).to(tl.float32)
        sin_y = tl.load(sin + HALF + column, mask=in_row).to(tl.float32)
        first = (x * cos_x + y * sin_x).to(rows.dtype.element_ty)
        second = (y * cos_y + x * sin_y).to(rows.dtype.element_ty)
    rest = first
    if REST_BLOCK > 0:
        last = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest = tl.load(rows + last, mask=there & (last < HEAD_DIM))
    return first, second, rest


@triton.jit
def _quantised(parts, factor, there, entry: tl.constexpr):
    """The parts of rows as 8-bit entries; factor: pointers [n, 1]."""
    by = tl.load(factor, mask=there)
    return quantise(parts[0], by, entry), quantise(parts[1], by, entry), quantise(parts[2], by, entry)


@triton.jit
def store_parts(
    rows, parts, there,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts as load_parts() gives them."""
    first, second, rest = parts
    column = tl.arange(0, HALF_BLOCK)[None, :]
    inside = there & (column < HALF)
    tl.store(rows + column, first, mask=inside)
    tl.store(rows + HALF + column, second, mask=inside)
    if REST_BLOCK > 0:
        last = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        tl.store(rows + last, rest, mask=there & (last < HEAD_DIM))
