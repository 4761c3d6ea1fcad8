"""Rotation of q and of the shared part of K, and latent entries into the pages of this worker and of a peer.

One Triton kernel, which computes what TorchLatentKernels.append does, but for rounding: it rotates in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.triton.append import AppendTargets, load_parts, store_parts
from tandem.cache.kernels.triton.dependent_launch import launch_options
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
) -> Tensor | None:
    """Rotates the last numbers of q in place; each token's latent and rotated key stand in one layer of its own slot,
    and of its peer's. Returns these entries, [T, 1, rank + rotated], if they are to be kept.

    pool: [num_pages, layers, 1, 1, page_size, rank + rotated], contiguous. q [T, num_heads, key_dim + rotated], latents
    [T, rank], keys [T, rotated]: any strides but 1 in the last. See append.py for targets.
    """
    (num_tokens, num_heads, width), rank, rotated = q.shape, latents.shape[1], keys.shape[1]
    entries = torch.empty((num_tokens, 1, rank + rotated), dtype=pool.dtype, device=pool.device) if keep else None
    cos, sin = (keys, keys) if rotation is None else (rotation.cos, rotation.signed_sin)
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    q_parts = 0 if rotation is None else triton.cdiv(num_heads, heads)
    kernel: Any = _append_latents[(num_tokens * (q_parts + 1),)]
    kernel(
        *(q, latents, keys, cos, sin, entries, pool, targets.slots, targets.peer_rows),
        *(q.stride(0), q.stride(1), latents.stride(0), keys.stride(0), cos.stride(0), sin.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), num_heads),
        *(q_parts, heads, width - rotated, pool.shape[4], rank, triton.next_power_of_2(rank)),
        *(rotated // 2, triton.next_power_of_2(rotated // 2), keep, targets.peer_rows is not None),
        **launch_options(pool.device),
    )
    return entries


@triton.jit
def _append_latents(
    q, latents, keys, cos, sin, entries, pool, slots, peer_rows,
    q_token, q_head, latent_token, key_token, cos_token, sin_token, page_elements, layer_elements, num_heads,
    Q_PARTS: tl.constexpr, HEADS: tl.constexpr, STILL: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    KEEP: tl.constexpr, HAS_PEER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has some heads of q, or the entry, of one token; a token's programs are neighbours."""
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
        latent = tl.load(latents + token * latent_token + column, mask=column < RANK)
        # Names of their own: Triton gives a variable one shape in both branches.
        key_rows = keys + token * key_token + one
        key = load_parts(key_rows, cos, sin, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0), Q_PARTS > 0)
        slot = tl.load(slots + token)
        if slot >= 0:
            offset = (slot // PAGE_SIZE).to(tl.int64) * page_elements + (slot % PAGE_SIZE) * (RANK + 2 * HALF)
            _store_entry(pool + offset + layer_elements, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK)
        if HAS_PEER:
            address = tl.load(peer_rows + token)
            if address != 0:
                # Without the hint the stores would be of one element each.
                peer_row = tl.multiple_of(address, 16).to(pool.dtype) + layer_elements
                _store_entry(peer_row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK)
        if KEEP:
            kept_row = entries + token * (RANK + 2 * HALF)
            _store_entry(kept_row, latent, key, RANK, RANK_BLOCK, HALF, HALF_BLOCK)


@triton.jit
def _store_entry(
    row, latent, key,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, 1)[:, None]
    column = tl.arange(0, RANK_BLOCK)[None, :]
    tl.store(row + one + column, latent, mask=column < RANK)
    store_parts(row + one + RANK, key, one == 0, 2 * HALF, HALF, HALF_BLOCK, tl.constexpr(0))
