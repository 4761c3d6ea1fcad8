"""Several new tokens of each of several sequences through convolution and gated delta rule, in three Triton kernels.

The chunk form of the delta rule (Yang et al., arXiv 2406.06484, with decays as in arXiv 2412.06464): what the CHUNK
tokens of a chunk add to a state S is u - w S, where u and w follow from the chunk alone, by the inverse of a triangular
matrix.

    _conv_chunks    q, k, v of all tokens; q and k get unit length     a program: a chunk and a head
    _solve_chunks   w, u, and scores within the chunk; new tails       a program: a chunk and a value head
    _scan_chunks    o, and S from chunk to chunk                       a program: a sequence and columns of a state

A snapshot may stand behind any token: a chunk ends there. The first kernel writes its tail, the last one its S.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.scratch import Scratch
from tandem.cache.kernels.delta.steps import silu_rounded
from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs
from tandem.cache.kernels.torch.delta_rule import CHUNK, UNIT_EPS
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.arrays import Int32Array, Int64Array, IntArray, ragged_range

BLOCK = 16  # rows of the diagonal blocks that are inverted row by row
LEAST = 32  # of each side of a product: with 16 columns, Triton 3.6's for 16 bits gave NaN on Hopper
ROWS = 16  # tokens at once of the convolution
CHUNK_FIELDS, SEQUENCE_FIELDS, PIECE_FIELDS = 4, 6, 3
NO_PAGE = -1


class Tiling(NamedTuple):
    """precision: of products. width: columns of q, k and v at once. values: columns of a state of one program."""

    precision: str
    width: int
    values: int
    warps: int
    stages: int


HALVES = Tiling("tf32", 64, 32, 4, 2)
# Each thread multiplies a part of a product by itself: larger parts of fewer threads do not fit into registers.
FLOATS = Tiling("ieee", 32, 16, 16, 1)


class ChunkRows(NamedTuple):
    """int32 on the device. sequences [n, SEQUENCE_FIELDS]: page, whether anything is behind the sequence, its first
    token, and the one behind its last; its first piece, and the one behind its last. pieces [p, PIECE_FIELDS]: the
    first token, the one behind the last, and the page of the snapshot there, or NO_PAGE. chunks [m, CHUNK_FIELDS]: the
    sequence, then as of pieces."""

    sequences: Tensor
    pieces: Tensor
    chunks: Tensor


class Cuts(NamedTuple):
    """Snapshots within the new tokens of n sequences, int64 [c] each: of sequences[i] the state before token tokens[i]
    of the forward goes to pages[i]."""

    sequences: Int64Array
    tokens: Int64Array
    pages: Int64Array


def lay_out_chunks(
    pages: IntArray, behind: IntArray, begins: IntArray, ends: IntArray, cuts: Cuts
) -> tuple[Int32Array, ...]:
    """Arrays of ChunkRows, of n sequences, [n] each: see there."""
    owners = np.concatenate((np.arange(begins.size), cuts.sequences))
    stops, kept = np.concatenate((ends, cuts.tokens)), np.concatenate((np.full(begins.size, NO_PAGE), cuts.pages))
    order = np.lexsort((-kept, stops, owners))
    owners, stops, kept = owners[order], stops[order], kept[order]
    is_first = np.diff(owners, prepend=-1) > 0
    starts = np.where(is_first, begins[owners], np.roll(stops, 1))
    there = starts < stops  # a snapshot behind the last token leaves no piece after it
    owners, starts, stops, kept = owners[there], starts[there], stops[there], kept[there]
    borders = np.searchsorted(owners, np.arange(begins.size + 1))
    sequences = np.stack((pages, behind, begins, ends, borders[:-1], borders[1:]), 1)
    counts = -(-(stops - starts) // CHUNK)
    pieces = np.repeat(np.arange(counts.size), counts)
    firsts = starts[pieces] + ragged_range(np.zeros_like(counts), counts) * CHUNK
    lasts = np.minimum(firsts + CHUNK, stops[pieces])
    chunks = np.stack((owners[pieces], firsts, lasts, np.where(lasts == stops[pieces], kept[pieces], NO_PAGE)), 1)
    return tuple(of.astype(np.int32) for of in (sequences, np.stack((starts, stops, kept), 1), chunks))


def advance_states(
    pool: Tensor, layer: int, x: RecurrentInputs, shape: DeltaShape, rows: ChunkRows, output: Tensor
) -> None:
    """As step_states, of all tokens of the sequences.

    Products of 16 bits have operands of the dtype of x.mixed, those of float32 are float32. Sums are float32.
    """
    dtype, device = x.mixed.dtype, pool.device
    heads = shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.tail
    key_heads, value_heads, key_dim, value_dim, tail = heads
    mixed, w, u, scores, totals = Scratch.of(x.mixed.shape[0], shape, dtype, device)
    tables = pool, rows.sequences, rows.chunks
    place = pool.stride(0), layer * pool.stride(1)
    keys, values = (max(triton.next_power_of_2(dim), LEAST) for dim in (key_dim, value_dim))
    sizes, fields = (*heads, CHUNK), (CHUNK_FIELDS, SEQUENCE_FIELDS)
    tiling = FLOATS if dtype == torch.float32 else HALVES
    count, options = rows.chunks.shape[0], launch_options(device)
    tiled = {"num_warps": tiling.warps, "num_stages": tiling.stages, **options}
    kernel: Any = _conv_chunks[(count, 2 * key_heads + value_heads)]
    kernel(
        *(x.mixed, x.conv, mixed, *tables, x.mixed.stride(0), *place, UNIT_EPS),
        *(*heads, max(keys, values), ROWS, *fields),
        **options,
    )
    kernel = _solve_chunks[(count, value_heads)]
    kernel(
        *(mixed, x.log_decay, x.strength, w, u, scores, totals, x.mixed, *tables),
        *(x.log_decay.stride(0), x.strength.stride(0), x.mixed.stride(0), *place, key_dim**-0.5),
        *(*sizes, keys, values, min(tiling.width, keys, values), BLOCK, *fields, tiling.precision),
        **tiled,
    )
    block = min(tiling.values, values)
    kernel = _scan_chunks[(rows.sequences.shape[0], value_heads, triton.cdiv(value_dim, block))]
    kernel(
        *(mixed, w, u, scores, totals, output, pool, rows.sequences, rows.pieces, *place, key_dim**-0.5),
        *(tail * shape.channels, *sizes, keys, block, SEQUENCE_FIELDS, PIECE_FIELDS, tiling.precision),
        **tiled,
    )


@triton.jit
def _conv_chunks(
    mixed, conv, output, pool, sequences, chunks, mixed_token, page_elements, layer_elements, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads of q come first, then those of k and of v. Tails stay as they are: other chunks read them, too. That of a
    snapshot behind the chunk is written."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    chunk = chunks + tl.program_id(0) * CHUNK_FIELDS
    sequence = sequences + tl.load(chunk) * SEQUENCE_FIELDS
    begin, end = tl.load(chunk + 1), tl.load(chunk + 2)
    page, behind, first = tl.load(sequence).to(tl.int64), tl.load(sequence + 1), tl.load(sequence + 2)
    head, column = tl.program_id(1), tl.arange(0, WIDTH)
    of_keys = head < 2 * KEY_HEADS
    lead = tl.where(of_keys, head * KEY_DIM, 2 * KEY_HEADS * (KEY_DIM - VALUE_DIM) + head * VALUE_DIM)
    width = tl.where(of_keys, KEY_DIM, VALUE_DIM)
    channel, there = lead + column, column < width
    tail = pool + page * page_elements + layer_elements + channel[None, :]
    held_before = tl.where(behind > 0, first, first - TAIL)  # no source is before that
    dtype: tl.constexpr = output.dtype.element_ty
    for start in range(begin, end, ROWS):
        token = start + tl.arange(0, ROWS)
        inside = (token < end)[:, None] & there[None, :]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for tap in tl.static_range(TAIL + 1):  # pyright: ignore[reportGeneralTypeIssues]
            source = token - (TAIL - tap)
            new = inside & (source >= first)[:, None]
            old = inside & (source < held_before)[:, None]
            own = tl.load(mixed + source.to(tl.int64)[:, None] * mixed_token + channel[None, :], mask=new, other=0.0)
            held = tl.load(tail + (source - first + TAIL)[:, None] * channels, mask=old, other=0.0)
            weight = tl.load(conv + channel * (TAIL + 1) + tap, mask=there, other=0.0).to(tl.float32)
            total += (own.to(tl.float32) + held) * weight[None, :]
        active = silu_rounded(total, dtype).to(tl.float32)
        length = tl.where(of_keys, 1.0 / tl.sqrt(tl.sum(active * active, 1) + eps), 1.0)
        places = output + token.to(tl.int64)[:, None] * channels + channel[None, :]
        tl.store(places, (active * length[:, None]).to(dtype), mask=inside)
    kept = tl.load(chunk + 3)
    if kept >= 0:
        last, own = mixed + end.to(tl.int64) * mixed_token, pool + page * page_elements + layer_elements
        target = pool + kept.to(tl.int64) * page_elements + layer_elements
        _move_tail(last, mixed_token, own, target, lead, width, end - first, behind > 0, channels, TAIL, WIDTH)


@triton.jit
def _solve_chunks(
    mixed, log_decay, beta, w, u, scores, totals, raw, pool, sequences, chunks,
    decay_token, beta_token, raw_token, page_elements, layer_elements, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of no token have β = 0 and k = 0. `totals` are sums of log_decay from the chunk's first token on."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    chunk = chunks + tl.program_id(0) * CHUNK_FIELDS
    begin, end, head = tl.load(chunk + 1), tl.load(chunk + 2), tl.program_id(1)
    row = tl.arange(0, CHUNK)
    token, inside = (begin + row).to(tl.int64), begin + row < end
    total = tl.cumsum(tl.load(log_decay + token * decay_token + head, mask=inside, other=0.0), 0)
    rate = tl.load(beta + token * beta_token + head, mask=inside, other=0.0).to(tl.float32)
    lines = mixed + token[:, None] * channels
    q = lines + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    k, v = q + KEY_HEADS * KEY_DIM, lines + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    within, system = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, KEYS, WIDTH):
        key = start + tl.arange(0, WIDTH)[None, :]
        in_key = inside[:, None] & (key < KEY_DIM)
        queries, keys = tl.load(q + key, mask=in_key, other=0.0), tl.load(k + key, mask=in_key, other=0.0)
        within = tl.dot(queries, tl.trans(keys), within, input_precision=PRECISION)
        system = tl.dot(keys, tl.trans(keys), system, input_precision=PRECISION)
    dtype: tl.constexpr = mixed.dtype.element_ty
    lower = row[:, None] >= row[None, :]
    decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    line = token * VALUE_HEADS + head
    tl.store(scores + line[:, None] * CHUNK + row[None, :], (within * decay * scale).to(dtype), mask=inside[:, None])
    strict = tl.where(row[:, None] > row[None, :], system * decay * rate[:, None], 0.0)
    inverse = invert_unit_lower(strict, CHUNK, BLOCK, PRECISION).to(dtype)
    decayed = (rate * tl.exp(total))[:, None]
    for start in range(0, KEYS, WIDTH):
        key = start + tl.arange(0, WIDTH)[None, :]
        in_key = inside[:, None] & (key < KEY_DIM)
        weighted = (tl.load(k + key, mask=in_key, other=0.0).to(tl.float32) * decayed).to(dtype)
        made = tl.dot(inverse, weighted, input_precision=PRECISION)
        tl.store(w + line[:, None] * KEY_DIM + key, made.to(dtype), mask=in_key)
    for start in range(0, VALUES, WIDTH):
        value = start + tl.arange(0, WIDTH)[None, :]
        in_value = inside[:, None] & (value < VALUE_DIM)
        targets = (tl.load(v + value, mask=in_value, other=0.0).to(tl.float32) * rate[:, None]).to(dtype)
        solved = tl.dot(inverse, targets, input_precision=PRECISION)
        tl.store(u + line[:, None] * VALUE_DIM + value, solved.to(dtype), mask=in_value)
    tl.store(totals + line, total, mask=inside)
    sequence = sequences + tl.load(chunk) * SEQUENCE_FIELDS
    if end == tl.load(sequence + 3):
        tail = pool + tl.load(sequence).to(tl.int64) * page_elements + layer_elements
        count, behind = end - tl.load(sequence + 2), tl.load(sequence + 1) > 0
        last = raw + end.to(tl.int64) * raw_token
        move_tails(last, raw_token, tail, tail, head, count, behind,
                   KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL, KEYS, VALUES)  # fmt: skip


@triton.jit
def move_tails(
    last, raw_token, tail, target, head, count, behind,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Of the channels of a value head, and, with the first one that a key head serves, of this: see _move_tail."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    _move_tail(last, raw_token, tail, target, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM, VALUE_DIM, count, behind,
               channels, TAIL, VALUES)  # fmt: skip
    if head % (VALUE_HEADS // KEY_HEADS) == 0:
        own = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        _move_tail(last, raw_token, tail, target, own, KEY_DIM, count, behind, channels, TAIL, KEYS)
        own += KEY_HEADS * KEY_DIM
        _move_tail(last, raw_token, tail, target, own, KEY_DIM, count, behind, channels, TAIL, KEYS)


@triton.jit
def _move_tail(
    last, raw_token, tail, target, channel, width, count, behind,
    CHANNELS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the channels channel … channel + width - 1 of a sequence whose tail `count` new tokens make `target`, which
    may be the same; `last`: behind the last of these."""
    column = tl.arange(0, BLOCK)
    for place in tl.static_range(TAIL):  # pyright: ignore[reportGeneralTypeIssues]
        back = TAIL - place
        own = last - back * raw_token.to(tl.int64) + channel + column
        new = tl.load(own, mask=column < tl.where(count >= back, width, 0), other=0.0).to(tl.float32)
        from_tail = tail + (count + place) * CHANNELS + channel + column
        old = tl.load(from_tail, mask=column < tl.where((count < back) & behind, width, 0), other=0.0)
        tl.debug_barrier()  # another thread may have loaded what this one writes over
        tl.store(target + place * CHANNELS + channel + column, new + old, mask=column < width)


@triton.jit
def invert_unit_lower(strict, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + strict, which is lower triangular, [SIZE, SIZE] of four blocks a side.

    D, the diagonal blocks, are inverted row by row. With N = D⁻¹ (what is below them), whose fourth power is 0, the
    inverse is (I - N) (I + N²) D⁻¹.
    """
    parts: tl.constexpr = SIZE // BLOCK
    tl.static_assert(parts == 4, "N has to be gone at its fourth power")
    first, second = tl.arange(0, parts)[:, None, None, None], tl.arange(0, parts)[None, None, :, None]
    blocks = tl.reshape(strict, (parts, BLOCK, parts, BLOCK))
    diagonal = tl.sum(tl.where(first == second, blocks, 0.0), 2)  # [parts, BLOCK, BLOCK]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros((parts, BLOCK, BLOCK), tl.float32)
    for step in range(1, BLOCK):
        own = tl.sum(tl.where(row == step, diagonal, 0.0), 1)
        made = tl.expand_dims(tl.sum(tl.expand_dims(own, 2) * inverse, 1), 1)
        inverse = tl.where((row == step) & (column < step), 0.0 - made, inverse)
    apart = tl.where(first == second, inverse[:, :, None, :], 0.0)
    whole = tl.reshape(apart, (SIZE, SIZE))
    place = tl.arange(0, SIZE) // BLOCK
    below = tl.where(place[:, None] > place[None, :], strict, 0.0)
    once = tl.dot(whole, below, input_precision=PRECISION)
    twice = tl.dot(once, once, input_precision=PRECISION)
    even = whole + tl.dot(twice, whole, input_precision=PRECISION)
    return even - tl.dot(once, even, input_precision=PRECISION)


@triton.jit
def _scan_chunks(
    mixed, w, u, scores, totals, output, pool, sequences, pieces, page_elements, layer_elements, scale,
    STATE: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TAIL: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SEQUENCE_FIELDS: tl.constexpr, PIECE_FIELDS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The state, which begins at STATE in an entry, stays in registers from a sequence's first chunk to its last. It is
    written behind each piece that ends with a snapshot, and behind the last."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    sequence, head = sequences + tl.program_id(0) * SEQUENCE_FIELDS, tl.program_id(1)
    row, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    entries = pool + layer_elements + STATE
    place = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    places = entries + tl.load(sequence).to(tl.int64) * page_elements + place
    seen = key < tl.where(tl.load(sequence + 1) > 0, KEY_DIM, 0)
    state = tl.load(places, mask=seen[:, None] & (value < VALUE_DIM)[None, :], other=0.0)
    dtype: tl.constexpr = mixed.dtype.element_ty
    of_head = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    for which in range(tl.load(sequence + 4), tl.load(sequence + 5)):
        piece = pieces + which * PIECE_FIELDS
        end = tl.load(piece + 1)
        for first in range(tl.load(piece), end, CHUNK):
            token, inside = (first + row).to(tl.int64), first + row < end
            in_key, in_value = (
                inside[:, None] & (key < KEY_DIM)[None, :],
                inside[:, None] & (value < VALUE_DIM)[None, :],
            )
            line = token * VALUE_HEADS + head
            total = tl.load(totals + line, mask=inside, other=0.0)
            whole = tl.sum(tl.where(row == tl.minimum(end - first, CHUNK) - 1, total, 0.0), 0)
            before = state.to(dtype)
            own = tl.load(w + line[:, None] * KEY_DIM + key[None, :], mask=in_key, other=0.0)
            added = tl.load(u + line[:, None] * VALUE_DIM + value[None, :], mask=in_value, other=0.0).to(tl.float32)
            added = (added - tl.dot(own, before, input_precision=PRECISION)).to(dtype)
            q = mixed + token[:, None] * channels + of_head + key[None, :]
            queries = tl.load(q, mask=in_key, other=0.0)
            found = tl.dot(queries, before, input_precision=PRECISION) * (tl.exp(total) * scale)[:, None]
            within = tl.load(scores + line[:, None] * CHUNK + row[None, :], mask=inside[:, None], other=0.0)
            found += tl.dot(within, added, input_precision=PRECISION)
            tl.store(output + line[:, None] * VALUE_DIM + value[None, :], found.to(dtype), mask=in_value)
            keys = tl.load(q + KEY_HEADS * KEY_DIM, mask=in_key, other=0.0).to(tl.float32)
            until_end = (keys * tl.exp(whole - total)[:, None]).to(dtype)
            state = state * tl.exp(whole) + tl.dot(tl.trans(until_end), added, input_precision=PRECISION)
        kept = tl.load(piece + 2)
        snapshot = entries + tl.maximum(kept, 0).to(tl.int64) * page_elements + place
        saved = (key < tl.where(kept >= 0, KEY_DIM, 0))[:, None] & (value < VALUE_DIM)[None, :]
        tl.store(snapshot, state, mask=saved)
    tl.store(places, state, mask=(key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :])
