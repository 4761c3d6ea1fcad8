"""How a chunk's tokens change any state, for a delta rule in which each row of a state has its own decay.

The product of two tokens i > j decays by exp(total_i - total_j) in each key dimension. A matrix product needs that as a
factor of i times a factor of j. For any row r between j and i, exp(total_i - total_r) and exp(total_r - total_j) are at
most 1, so nothing overflows, however fast a state decays. So the chunk is halved repeatedly. Each level multiplies a
second half's tokens by the first half's, and r is the last row of the first half.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.convolution import move_tails_behind
from tandem.cache.kernels.delta.solve import invert_unit_lower, meet


@triton.jit
def solve_row_chunks(
    mixed, log_decay, strength, w, added, scores, since, raw, pool, sequences, chunks,
    decay_token, strength_token, raw_token, page_elements, layer_elements, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    BY_ROW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See solve_chunks. Each key head has one value head. It replaces q by q as it reads the state before the chunk,
    and k by k as it writes the state after it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    which, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + which * CHUNK_FIELDS + 1), tl.load(chunks + which * CHUNK_FIELDS + 2)
    row = tl.arange(0, CHUNK)
    token, inside = (begin + row).to(tl.int64), begin + row < end
    rate = tl.load(strength + token * strength_token + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.expand_dims(rate, 1)
    decays = log_decay + token[:, None] * decay_token + head * KEY_DIM
    own = mixed + which.to(tl.int64) * (CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES))
    q = own + CHUNK * KEYS * head + row[:, None] * KEYS
    k = q + CHUNK * KEYS * KEY_HEADS
    v = own + CHUNK * (2 * KEYS * KEY_HEADS + head * VALUES) + row[:, None] * VALUES
    dtype: tl.constexpr = mixed.dtype.element_ty
    within, system = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, KEYS, WIDTH):
        key = start + tl.arange(0, WIDTH)[None, :]
        total = tl.cumsum(tl.load(decays + key, mask=inside[:, None] & (key < KEY_DIM), other=0.0), 0)
        queries, keys = tl.load(q + key).to(tl.float32), tl.load(k + key).to(tl.float32)
        alone = tl.expand_dims(tl.sum(queries * keys, 1), 1)
        within += tl.where(row[:, None] == row[None, :], alone, 0.0)
        for level in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
            decay = tl.exp(0.0 - tl.abs(total - _at_half(total, CHUNK, WIDTH, 1 << level)))
            right = (keys * decay).to(dtype)
            read = tl.dot((queries * decay).to(dtype), tl.trans(right), input_precision=PRECISION)
            there = meet(row[:, None], row[None, :], level)
            within += tl.where(there, read, 0.0)
            system += tl.where(there, tl.dot(right, tl.trans(right), input_precision=PRECISION), 0.0)
    line = (which.to(tl.int64) * VALUE_HEADS + head) * CHUNK
    tl.store(scores + (line + row)[:, None] * CHUNK + row[None, :], (within * scale).to(dtype))
    inverse = invert_unit_lower(system * rate, CHUNK, LEVELS, PRECISION).to(dtype)
    for start in range(0, KEYS, WIDTH):
        key = start + tl.arange(0, WIDTH)[None, :]
        total = tl.cumsum(tl.load(decays + key, mask=inside[:, None] & (key < KEY_DIM), other=0.0), 0)
        whole = tl.expand_dims(tl.sum(tl.where((row == CHUNK - 1)[:, None], total, 0.0), 0), 0)
        left = tl.exp(total)
        queries, keys = tl.load(q + key).to(tl.float32), tl.load(k + key).to(tl.float32)
        made = tl.dot(inverse, (keys * left * rate).to(dtype), input_precision=PRECISION)
        tl.store(w + (line + row)[:, None] * KEYS + key, made.to(dtype))
        tl.store(since + (which.to(tl.int64) * VALUE_HEADS + head) * KEYS + key, tl.exp(whole))
        tl.debug_barrier()  # another thread may have loaded what this one writes over
        tl.store(q + key, (queries * left).to(dtype))
        tl.store(k + key, (keys * tl.exp(whole - total)).to(dtype))
    for start in range(0, VALUES, WIDTH):
        value = start + tl.arange(0, WIDTH)
        targets = (tl.load(v + value[None, :]).to(tl.float32) * rate).to(dtype)
        solved = tl.dot(tl.trans(targets), tl.trans(inverse), input_precision=PRECISION)
        tl.store(added + line * VALUES + value[:, None] * CHUNK + row[None, :], solved.to(dtype))
    move_tails_behind(which, raw, raw_token, pool, page_elements, layer_elements, sequences, chunks, head, KEY_HEADS,
                      VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL, QUERY_AT, KEY_AT, VALUE_AT, KEYS, VALUES, CHUNK_FIELDS,
                      SEQUENCE_FIELDS)  # fmt: skip


@triton.jit
def _at_half(total, CHUNK: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Returns for each row the last row of the first half of its block of 2 · HALF rows. total: [CHUNK, WIDTH]."""
    pairs = tl.reshape(total, (CHUNK // (2 * HALF), 2 * HALF, WIDTH))
    is_last = tl.arange(0, 2 * HALF)[None, :, None] == HALF - 1
    last = tl.expand_dims(tl.sum(tl.where(is_last, pairs, 0.0), 1), 1)
    return tl.reshape(tl.broadcast_to(last, (CHUNK // (2 * HALF), 2 * HALF, WIDTH)), (CHUNK, WIDTH))
