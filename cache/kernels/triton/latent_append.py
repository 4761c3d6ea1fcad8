"""Rotation of q and of the shared part of K, and latent entries into the pages of this worker and of a peer.

One Triton kernel, which computes what TorchLatentKernels.append does, but for rounding: it rotates in float32.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.append import AppendTargets, load_parts, store_parts
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.fp8 import power_of_two, quantise
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.rope import Rotation

HEADS_PER_PROGRAM = 8


def append_latents(
    pool: Tensor,
    layer: int,
    q: Tensor,
    latents: Tensor,
    keys: Tensor,
    rotation: Rotation | None,
    targets: AppendTargets,
    *,
    keep: bool,
    fp8: Fp8Rows | None = None,
) -> Tensor | None:
    """Rotates the last numbers of q in place; each token's latent and rotated key stand in one layer of its own slot,
    and of its peer's. Returns these entries, as they are stored, [T, 1, rank + rotated], if they are to be kept.

    pool: [num_pages, layers, 1, 1, page_size, rank + rotated], contiguous; fp8: how one of 8 bits has the entries: the
    latent quantized and the key as it is, or all by one scale. q [T, num_heads, key_dim + rotated], latents
    [T, rank], keys [T, rotated]: any strides but 1 in the last. See append.py for targets.
    """
    (num_tokens, num_heads, width), rank, rotated = q.shape, latents.shape[1], keys.shape[1]
    row = pool.shape[5]
    entries = torch.empty((num_tokens, 1, row), dtype=pool.dtype, device=pool.device) if keep else None
    group = 0 if fp8 is None else fp8.group_columns
    cos, sin = (keys, keys) if rotation is None else (rotation.cos, rotation.signed_sin)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    q_parts = 0 if rotation is None else cdiv(num_heads, heads)
    kernel: Any = _append_latents[(num_tokens * (q_parts + 1),)]
    kernel(
        *(q, latents, keys, cos, sin, entries, pool, targets.slots, targets.peer_rows),
        *(q.stride(0), q.stride(1), latents.stride(0), keys.stride(0), cos.stride(0), sin.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), num_heads),
        *(q_parts, heads, width - rotated, pool.shape[4], rank, next_power_of_2(rank)),
        *(rotated // 2, next_power_of_2(rotated // 2), keep, targets.peer_rows is not None),
        *(row, 16 if fp8 is None else math.gcd(16, row), group, fp8 is not None and fp8.quantized > rank),
        **launch_options(pool.device),
    )
    return entries


@triton.jit
def _append_latents(
    q, latents, keys, cos, sin, entries, pool, slots, peer_rows,
    q_token, q_head, latent_token, key_token, cos_token, sin_token, page_elements, layer_elements, num_heads,
    Q_PARTS: tl.constexpr, HEADS: tl.constexpr, STILL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    KEEP: tl.constexpr, HAS_PEER: tl.constexpr, ROW: tl.constexpr, ALIGNMENT: tl.constexpr, GROUP: tl.constexpr,
    ONE_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has some heads of q, or the entry, of one token; a token's programs are neighbours.

    ROW: elements of an entry as it is stored. GROUP: latents of 8 bits that share a scale; 0: entries are as they came.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // (Q_PARTS + 1)).to(tl.int64)
    part = tl.program_id(0) % (Q_PARTS + 1)
    cos += token * cos_token
    sin += token * sin_token
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        rows = q + token * q_token + head * q_head + STILL
        there = head < num_heads
        queries = load_parts(rows, cos, sin, there, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0), tl.constexpr(True))
        store_parts(rows, queries, there, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0))
    else:
        one = tl.arange(0, 1)[:, None]
        column = tl.arange(0, RANK_BLOCK)[None, :]
        latent = tl.load(latents + token * latent_token + column, mask=column < RANK, other=0.0)
        # Names of their own: Triton gives a variable one shape in both branches.
        key_rows = keys + token * key_token + one
        key = load_parts(key_rows, cos, sin, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0), Q_PARTS > 0)
        slot = tl.load(slots + token)
        if slot >= 0:
            offset = (slot // PAGE_SIZE).to(tl.int64) * page_elements + (slot % PAGE_SIZE) * ROW
            own_row = pool + offset + layer_elements
            _store_entry(own_row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK, GROUP, ONE_SCALE)
        if HAS_PEER:
            address = tl.load(peer_rows + token)
            if address != 0:
                # Without the hint the stores would be of one element each.
                peer_row = tl.multiple_of(address, ALIGNMENT).to(pool.dtype) + layer_elements
                _store_entry(peer_row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK, GROUP, ONE_SCALE)
        if KEEP:
            kept_row = entries + token * ROW
            _store_entry(kept_row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK, GROUP, ONE_SCALE)


@triton.jit
def _store_entry(
    row, latent, key,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, 1)[:, None]
    column = tl.arange(0, RANK_BLOCK)[None, :]
    if GROUP == 0:
        tl.store(row + one + column, latent, mask=column < RANK)
        store_parts(row + one + RANK, key, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0))
    elif ONE_SCALE:
        _store_by_one_scale(row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK)
    else:
        dtype = row.dtype.element_ty
        for group in tl.static_range((RANK + GROUP - 1) // GROUP):  # pyright: ignore[reportGeneralTypeIssues]
            mine = (column >= group * GROUP) & (column < tl.minimum((group + 1) * GROUP, RANK))
            numbers = tl.where(mine, latent.to(tl.float32), 0.0)
            scale, inverse = power_of_two(tl.max(tl.abs(numbers)))  # pyright: ignore[reportGeneralTypeIssues]
            tl.store(row + one + column, quantise(numbers, inverse, dtype), mask=mine)
            tl.store((row + RANK).to(tl.pointer_type(tl.float32)) + group, scale)
        others = (row + RANK + 4 * ((RANK + GROUP - 1) // GROUP)).to(tl.pointer_type(key[0].dtype))
        store_parts(others + one, key, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0))


@triton.jit
def _store_by_one_scale(
    row, latent, key,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, 1)[:, None]
    column, narrow = tl.arange(0, RANK_BLOCK)[None, :], tl.arange(0, HALF_BLOCK)[None, :]
    dtype = row.dtype.element_ty
    # What was not loaded means nothing.
    first = tl.where(narrow < HALF, key[0].to(tl.float32), 0.0)
    second = tl.where(narrow < HALF, key[1].to(tl.float32), 0.0)
    most = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
    scale, inverse = power_of_two(tl.maximum(most, tl.max(tl.abs(latent.to(tl.float32)))))
    tl.store(row + one + column, quantise(latent, inverse, dtype), mask=column < RANK)
    parts = quantise(first, inverse, dtype), quantise(second, inverse, dtype), quantise(first, inverse, dtype)
    store_parts(row + one + RANK, parts, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0))
    tl.store((row + RANK + 2 * HALF).to(tl.pointer_type(tl.float32)), scale)
