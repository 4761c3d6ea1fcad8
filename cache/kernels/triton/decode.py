"""A layer's decode step in one Triton kernel: norm of heads, rotation, append and attention over the page table.

Flash-decoding (Dao et al., 2023): the positions of a sequence are split over several programs for each KV head, and the
last to finish merges all results. decode_plan.py assigns positions to programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.decode_merge import LOG2E, leave
from tandem.cache.kernels.triton.decode_plan import ENTRY, DecodePlan, choose_tiling, tile_rows
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.fp8 import quantise, widen_pairs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.rope import Rotation

MAX_WARPS = 8
SUMS_OF_A_WARP = 1024  # of V: more do not fit into its registers


def decode(
    pool: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotation: Rotation | None,
    plan: DecodePlan,
    scoring: Scoring,
    sinks: Tensor | None,
    norm: HeadNorm | None,
    fp8: Fp8Entries | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """o [B, num_q_heads, head_dim] of one new token each of B sequences; see AttentionBackend.run, and read where k and
    v are None.

    schedule_splits() has been queued for the lengths that plan.tables have.

    pool: as for append. q [B, num_q_heads, head_dim], k and v [B, num_kv_heads, head_dim]: tokens may lie apart, and
    heads of q, as those with gates between them do; a token's k is contiguous, and its v. head_dim: a power of two, at
    least 16. fp8: of a pool of 8-bit entries. out: where o is written, contiguous; None: new memory.
    """
    rows, num_q_heads, head_dim = q.shape
    _, _, _, num_kv_heads, page_size, _ = pool.shape
    group = num_q_heads // num_kv_heads
    rotary_dim = head_dim if rotation is None else rotation.cos.shape[-1]
    cos, sin = (q, q) if rotation is None else (rotation.cos, rotation.signed_sin)
    factors, inverse = (q, q) if fp8 is None else (fp8.scales[layer], fp8.inverse[layer])
    output = torch.empty((rows, num_q_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    tables = plan.tables
    tiling = choose_tiling(plan, head_dim, fp8)
    on_gpu = pool.device.type == "cuda"
    of_tile = tile_rows(group)
    pack = 1 if scoring.window else plan.pack
    entries = plan.schedule.shape[0]
    kernel: Any = _decode[(entries * num_kv_heads,)]
    kernel(
        q=q,
        k=q if k is None else k,
        v=q if v is None else v,
        norm=q if norm is None else norm.weight,
        cos=cos,
        sin=sin,
        pool=pool,
        slots=tables.slots,
        kv_indices=tables.kv_indices,
        schedule=plan.schedule,
        sinks=q if sinks is None else sinks,
        factors=factors,
        inverse=inverse,
        partial=plan.partial,
        counters=plan.counters,
        preceding=tables.slots if tables.preceding is None else tables.preceding,
        output=output,
        q_token=q.stride(0),
        q_apart=q.stride(1),
        k_token=0 if k is None else k.stride(0),
        v_token=0 if v is None else v.stride(0),
        cos_token=cos.stride(0),
        sin_token=sin.stride(0),
        page_elements=pool.stride(0),
        layer_elements=layer * pool.stride(1),
        scale=scoring.scale,
        softcap=scoring.softcap or 0.0,
        eps=0.0 if norm is None else norm.eps,
        entries=entries,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        PACK=pack,
        ROWS=of_tile,
        FEW_ROWS=next_power_of_2(group * pack),
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        PAGE_SIZE=page_size,
        BLOCK=tiling.block,
        MOST_SPLITS=next_power_of_2(plan.most_splits),
        CAPPED=scoring.softcap is not None,
        SINKS=sinks is not None,
        READ=k is None,
        RUNS=tables.preceding is not None,
        WINDOW=0 if tables.preceding is None else scoring.window or 0,
        NORM=norm is not None,
        ROUND=norm is not None and norm.weight.dtype == q.dtype,
        ROTATE=rotation is not None,
        FP8=fp8 is not None,
        PTX=on_gpu,
        TWO=tiling.two and on_gpu,
        num_warps=max(tiling.warps, min(of_tile * head_dim // SUMS_OF_A_WARP, MAX_WARPS)),
        num_stages=tiling.stages,
        **launch_options(pool.device),
    )
    return output


@triton.jit(do_not_specialize=["entries"])
def _decode(
    q, k, v, norm, cos, sin, pool, slots, kv_indices, schedule, sinks,
    factors, inverse, partial, counters, preceding, output,
    q_token, q_apart, k_token, v_token, cos_token, sin_token, page_elements, layer_elements, scale, softcap, eps,
    entries, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr,
    FEW_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    MOST_SPLITS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, READ: tl.constexpr, RUNS: tl.constexpr,
    WINDOW: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, ROTATE: tl.constexpr, FP8: tl.constexpr,
    PTX: tl.constexpr, TWO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has one piece of one sequence, for the q heads of one KV head.

    Schedule, tables and stored positions are older than the step's products: only the new token waits for earlier
    kernels. The first program of a KV head stores it, and begins its softmax with it, so that no program reads what
    is being written. Where rows are of one sequence (RUNS), it goes on with the new tokens of the rows before: a tile
    has the q heads of up to PACK of them, one token after the other. Where an earlier kernel has stored the new tokens
    (READ), it takes them from there.
    """
    if PDL:
        gdc_launch_dependents()
    if TWO:
        _keep_room()
    head = tl.program_id(0) % KV_HEADS
    entry = schedule + tl.program_id(0) // KV_HEADS * ENTRY
    owner = tl.load(entry)
    split = tl.load(entry + 1)
    used = tl.load(entry + 2)
    begin = tl.load(entry + 3)
    end = tl.load(entry + 4)
    first = tl.load(entry + 5)
    first_page = tl.load(entry + 6)
    token = tl.maximum(owner, 0).to(tl.int64)
    count, before = 1, 0  # tokens of the tile, and before the last one
    if RUNS:
        before = tl.load(preceding + token)
    if PACK > 1:
        count = before % PACK + 1  # pyright: ignore[reportOperatorIssue]
        of_tile = tl.minimum(tl.arange(0, ROWS) // GROUP, count - 1)  # which token each row is of
        tokens = token - count + 1 + of_tile[:, None]
    else:
        tokens = token
    slot = tl.load(slots + tokens)
    if owner >= 0:  # others end at once, also before earlier kernels do
        if PDL:
            gdc_wait()
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
        one = tl.arange(0, 1)[:, None]
        q_head = head * GROUP + (row % GROUP if PACK > 1 else row)
        query = _prepare(
            q + tokens * q_token + q_head * q_apart, norm + q_head * HEAD_DIM,
            cos + tokens * cos_token, sin + tokens * sin_token, row < count * GROUP, column,
            eps, HEAD_DIM, HALF, NORM, ROUND, ROTATE,
        )  # fmt: skip
        new_k = k + (head + one) * HEAD_DIM
        new_v = v + (head + one) * HEAD_DIM
        gains = norm + (KV_HEADS * GROUP + head + one) * HEAD_DIM
        head_rows = pool + layer_elements + head * (PAGE_SIZE * HEAD_DIM)
        to_values = KV_HEADS * PAGE_SIZE * HEAD_DIM
        if READ:
            key, value = _stored_entry(head_rows, slot, page_elements, to_values, one, column, HEAD_DIM, PAGE_SIZE)
        else:
            key, value = _new_entry(
                *(new_k, new_v, gains, cos, sin, inverse + head, pool.dtype.element_ty, tokens, one, column),
                *(k_token, v_token, cos_token, sin_token, eps, KV_HEADS, HEAD_DIM, HALF, NORM, ROUND, ROTATE, FP8),
            )
        if FP8:
            # What products with entries lack is made up for in the scores' scale and in the sums.
            query = query.to(tl.float16)
            scale *= tl.load(factors + head)
        if not READ:  # a choice of the compiler around one of the program
            if PACK > 1:
                if split == 0:
                    own = head_rows + (slot // PAGE_SIZE).to(tl.int64) * page_elements + slot % PAGE_SIZE * HEAD_DIM
                    of_one = (slot >= 0) & (row < count * GROUP) & (row % GROUP == 0)  # a row for each token
                    tl.store(own + column, key, mask=of_one)
                    tl.store(own + to_values + column, value, mask=of_one)
            elif (split == 0) & (slot >= 0):
                own = head_rows + (slot // PAGE_SIZE).to(tl.int64) * page_elements + slot % PAGE_SIZE * HEAD_DIM
                tl.store(own + one + column, key)
                tl.store(own + to_values + one + column, value)
        # The first program begins with the new token, the others with nothing.
        new = _score(tl.sum(query.to(tl.float32) * key.to(tl.float32), 1), scale, softcap, CAPPED)
        row_max = tl.where(split == 0, new, float("-inf"))
        row_sum = tl.where(split == 0, new * 0.0 + 1.0, 0.0)
        acc = tl.where(split == 0, value.to(tl.float32), 0.0) + tl.zeros((ROWS, HEAD_DIM), tl.float32)
        if RUNS:
            if WINDOW > 0:
                before = tl.minimum(before, WINDOW - 1)
            for age in range(1, tl.where(split == 0, before, 0) + 1):
                own_row = tokens - age
                if PACK > 1:
                    own_row = tl.maximum(own_row, token - before)  # of an early token there may be none
                if READ:
                    earlier = tl.load(slots + own_row)
                    key, value = _stored_entry(
                        head_rows, earlier, page_elements, to_values, one, column, HEAD_DIM, PAGE_SIZE
                    )
                else:
                    key, value = _new_entry(
                        *(new_k, new_v, gains, cos, sin, inverse + head, pool.dtype.element_ty, own_row, one, column),
                        *(k_token, v_token, cos_token, sin_token, eps),
                        *(KV_HEADS, HEAD_DIM, HALF, NORM, ROUND, ROTATE, FP8),
                    )
                new = _score(tl.sum(query.to(tl.float32) * key.to(tl.float32), 1), scale, softcap, CAPPED)
                if PACK > 1:
                    sees = before - count + 1 + of_tile  # pyright: ignore[reportPossiblyUnboundVariable]
                    new = tl.where(age <= sees, new, float("-inf"))
                higher = tl.maximum(row_max, new)
                kept = tl.exp2(row_max - higher)
                weight = tl.exp2(new - higher)
                row_sum = row_sum * kept + weight
                acc = acc * kept[:, None] + weight[:, None] * value.to(tl.float32)
                row_max = higher
        row_max, row_sum, acc = _attend(
            *(query, row_max, row_sum, acc, head_rows, to_values, kv_indices + first_page, begin, end),
            *(page_elements, scale, softcap, ROWS, HEAD_DIM, PAGE_SIZE, BLOCK, CAPPED, FP8, PTX),
        )
        if FP8:
            acc *= tl.load(factors + KV_HEADS + head)
        counter = counters + token * KV_HEADS + head
        q_heads = (token - count + 1) * (KV_HEADS * GROUP) + head * GROUP
        leave(
            *(row_max, row_sum, acc, partial, counter, sinks, output, q_heads, head, count, split, used, first),
            *(entries, KV_HEADS, GROUP, PACK, ROWS, FEW_ROWS, HEAD_DIM, MOST_SPLITS, SINKS),
        )


@triton.jit
def _new_entry(
    k, v, gains, cos, sin, inverse, entry: tl.constexpr, token, one, column,
    k_token, v_token, cos_token, sin_token, eps,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr,
    ROTATE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """K and V [1, HEAD_DIM] of a new token, as they are stored in one KV head, where the pointers point to."""
    key = _prepare(
        k + token * k_token, gains, cos + token * cos_token, sin + token * sin_token, one < 1, column,
        eps, HEAD_DIM, HALF, NORM, ROUND, ROTATE,
    )  # fmt: skip
    value = tl.load(v + token * v_token + column)
    if FP8:
        key = quantise(key, tl.load(inverse), entry)
        value = quantise(value, tl.load(inverse + KV_HEADS), entry)
    return key, value


@triton.jit
def _stored_entry(
    head_rows, slot, page_elements, to_values, one, column, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """K and V [1, HEAD_DIM] as they stand in a slot of one KV head; of padding in any, since nobody looks at it."""
    there = tl.maximum(slot, 0)
    own = head_rows + (there // PAGE_SIZE).to(tl.int64) * page_elements + there % PAGE_SIZE * HEAD_DIM + one + column
    return tl.load(own), tl.load(own + to_values)


@triton.jit
def _keep_room():
    """Shared memory that is never read: of programs that take 60 to 97 KiB, Triton's own, no third one fits with it.

    Programs that begin while the kernel before still ends would gather where it has ended first, three on some
    multiprocessors and one on others.
    """
    tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 room[16384]; st.shared.b32 [room], 0; mov.b32 $0, 0; }",
        constraints="=r",
        args=[],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _attend(
    query, row_max, row_sum, acc, head_rows, to_values, pages, begin, end, page_elements, scale, softcap,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The online softmax (row_max, row_sum, and acc, the weighted sum of V), continued over positions begin … end.

    head_rows: pointer to the rows of K on page 0; pages: pointer to the sequence's page ids."""
    column, pair = tl.arange(0, HEAD_DIM)[None, :], tl.arange(0, HEAD_DIM // 2)[None, :]
    even, odd = tl.split(tl.reshape(acc, (ROWS, HEAD_DIM // 2, 2)))
    for start in range(begin, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        there = position < end
        page = tl.load(pages + position // PAGE_SIZE, mask=there, other=0).to(tl.int64)
        lines = (head_rows + page * page_elements + position % PAGE_SIZE * HEAD_DIM)[:, None]
        keys = tl.load(lines + column, mask=there[:, None], other=0.0).to(query.dtype)
        scores = _score(tl.dot(query, tl.trans(keys)), scale, softcap, CAPPED)
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(row_max - higher)
        row_sum = row_sum * kept + tl.sum(weights, 1)
        weights = weights.to(query.dtype)
        if FP8:
            pairs = (lines + to_values).to(tl.pointer_type(tl.int16)) + pair
            of_even, of_odd = widen_pairs(tl.load(pairs, mask=there[:, None], other=0), PTX)
            even = even * kept[:, None] + tl.dot(weights, of_even)
            odd = odd * kept[:, None] + tl.dot(weights, of_odd)
        else:
            values = tl.load(lines + to_values + column, mask=there[:, None], other=0.0)
            acc = acc * kept[:, None] + tl.dot(weights, values)
        row_max = higher
    if FP8:
        acc = tl.interleave(even, odd)
    return row_max, row_sum, acc


@triton.jit
def _prepare(
    rows, weights, cos, sin, there, column, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Heads [n, HEAD_DIM] at `rows` (pointers [n, 1]), normed and rotated, in their own dtype; 0 where not there."""
    dtype = rows.dtype.element_ty
    x = tl.load(rows + column, mask=there, other=0.0).to(tl.float32)
    y, partner = x, column
    if ROTATE:
        partner = tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))
        y = tl.load(rows + partner, mask=there, other=0.0).to(tl.float32)
    if NORM:
        inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps))[:, None]
        x = _weigh(x * inverse, weights + column, there, dtype, ROUND)
        if ROTATE:
            y = _weigh(y * inverse, weights + partner, there, dtype, ROUND)
    if ROTATE:
        rotated = column < 2 * HALF
        x = x * tl.load(cos + column, mask=rotated, other=1.0) + y * tl.load(sin + column, mask=rotated, other=0.0)
    return x.to(dtype)


@triton.jit
def _weigh(normed, weights, there, dtype: tl.constexpr, ROUND: tl.constexpr):
    """normed · weights, float32, rounded where LayerKernels.norm_heads rounds."""
    if ROUND:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * tl.load(weights, mask=there, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _score(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in units of log 2."""
    if CAPPED:
        return (2.0 * tl.sigmoid(2.0 * products * scale / softcap) - 1.0) * softcap * LOG2E
    return products * (scale * LOG2E)
