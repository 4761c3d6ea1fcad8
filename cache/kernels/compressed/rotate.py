"""Rotation of neighbours, and K = V into its slots: a Triton kernel, which computes what rotate_and_append() of
reference.py does."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.rope import Rotation

HEADS_PER_PROGRAM = 8


def rotate_and_append(
    pool: Tensor, layer: int, q: Tensor, kv: Tensor, rotation: Rotation | None, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """See reference.py. D is a power of two; q and kv have any strides but 1 in the last dimension."""
    num_tokens, num_heads, size = q.shape
    turned = torch.empty((num_tokens, num_heads, size), dtype=q.dtype, device=pool.device)
    entries = torch.empty((num_tokens, 1, size), dtype=kv.dtype, device=pool.device)
    cos, sin, pitch, rotated = factors_of(rotation, q)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    kernel: Any = _rotate_and_append[(num_tokens, cdiv(num_heads, heads) + 1)]
    kernel(
        *(q, kv, cos, sin, turned, entries, pool, slots, q.stride(0), q.stride(1), kv.stride(0), pitch),
        *(pool.stride(0), layer * pool.stride(1), num_heads, heads, size, rotated, pool.shape[4]),
        APPENDS=True,
        **launch_options(pool.device),
    )
    return turned, entries


def rotate_queries(q: Tensor, rotation: Rotation | None) -> Tensor:
    """q [T, heads, D] rotated as neighbours."""
    num_tokens, num_heads, size = q.shape
    turned = torch.empty((num_tokens, num_heads, size), dtype=q.dtype, device=q.device)
    cos, sin, pitch, rotated = factors_of(rotation, q)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    kernel: Any = _rotate_and_append[(num_tokens, cdiv(num_heads, heads))]
    kernel(
        *(q, q, cos, sin, turned, turned, turned, turned, q.stride(0), q.stride(1), 0, pitch),
        *(0, 0, num_heads, heads, size, rotated, 1),
        APPENDS=False,
        **launch_options(q.device),
    )
    return turned


def factors_of(rotation: Rotation | None, other: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin of the pairs of each token, the distance of two tokens', and how many numbers of a head are rotated.
    other: what stands for both where none are."""
    if rotation is None:
        return other, other, 0, 0
    size = rotation.cos.shape[2]
    return rotation.cos, rotation.signed_sin[..., size // 2 :], rotation.cos.stride(0), size


@triton.jit
def rotate_pairs(
    x, cos, sin, direction, ROWS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """x float32 [ROWS, SIZE] with its last ROTATED numbers rotated, neighbours as one pair. cos, sin: at the factors of
    the pairs. direction: 1, or -1 for the other way."""
    turned = x
    if ROTATED > 0:
        even, odd = tl.split(tl.reshape(x, (ROWS, SIZE // 2, 2)))
        pair = tl.arange(0, SIZE // 2) - (SIZE - ROTATED) // 2
        c = tl.load(cos + pair, mask=pair >= 0, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + pair, mask=pair >= 0, other=0.0).to(tl.float32)[None, :] * direction
        turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (ROWS, SIZE))
    return turned


@triton.jit
def _rotate_and_append(
    q, kv, cos, sin, turned, entries, pool, slots, q_token, q_head, kv_token, factors_token,
    page_elements, layer_elements, num_heads,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, PAGE_SIZE: tl.constexpr, APPENDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program has some heads of q, or the entry, of one token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, SIZE)
    cos += token * factors_token
    sin += token * factors_token
    if part * HEADS < num_heads:
        head = part * HEADS + tl.arange(0, HEADS)
        there = (head < num_heads)[:, None]
        rows = tl.load(q + token * q_token + head[:, None] * q_head + column[None, :], mask=there, other=0.0)
        rows = rotate_pairs(rows.to(tl.float32), cos, sin, 1.0, HEADS, SIZE, ROTATED)
        target = turned + (token * num_heads + head[:, None]) * SIZE + column[None, :]
        tl.store(target, rows.to(turned.dtype.element_ty), mask=there)
    elif APPENDS:
        entry = tl.load(kv + token * kv_token + column)[None, :].to(tl.float32)
        entry = rotate_pairs(entry, cos, sin, 1.0, tl.constexpr(1), SIZE, ROTATED)
        entry = tl.reshape(entry, (SIZE,)).to(entries.dtype.element_ty)
        tl.store(entries + token * SIZE + column, entry)
        slot = tl.load(slots + token)
        if slot >= 0:
            row = (slot // PAGE_SIZE).to(tl.int64) * page_elements + layer_elements + (slot % PAGE_SIZE) * SIZE
            tl.store(pool + row + column, entry)
