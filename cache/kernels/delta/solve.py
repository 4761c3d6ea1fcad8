"""How a chunk's tokens change any state, for rules with one decay for each head."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.convolution import move_tails_behind


@triton.jit
def solve_chunks(
    mixed, log_decay, strength, w, added, scores, since, until, raw, pool, sequences, chunks,
    decay_token, strength_token, raw_token, page_elements, layer_elements, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    BY_ROW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    LEVELS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program handles one value head of a chunk. WIDTH: columns of a key or value handled at once. Rows without a
    token have strength 0, k = 0 and no decay. 2^LEVELS is CHUNK. It also moves the tails of sequences that end here."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    which, head = tl.program_id(0), tl.program_id(1)
    chunk = chunks + which * CHUNK_FIELDS
    begin, end = tl.load(chunk + 1), tl.load(chunk + 2)
    row = tl.arange(0, CHUNK)
    token, inside = (begin + row).to(tl.int64), begin + row < end
    total = tl.cumsum(tl.load(log_decay + token * decay_token + head, mask=inside, other=0.0), 0)
    rate = tl.load(strength + token * strength_token + head, mask=inside, other=0.0).to(tl.float32)
    own = mixed + which.to(tl.int64) * (CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES))
    q = own + CHUNK * KEYS * (head // (VALUE_HEADS // KEY_HEADS)) + row[:, None] * KEYS
    k = q + CHUNK * KEYS * KEY_HEADS
    v = own + CHUNK * (2 * KEYS * KEY_HEADS + head * VALUES) + row[:, None] * VALUES
    within, system = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in tl.static_range(0, KEYS, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        key = start + tl.arange(0, WIDTH)[None, :]
        queries, keys = tl.load(q + key), tl.load(k + key)
        within = tl.dot(queries, tl.trans(keys), within, input_precision=PRECISION)
        if IS_DELTA:
            system = tl.dot(keys, tl.trans(keys), system, input_precision=PRECISION)
    dtype: tl.constexpr = mixed.dtype.element_ty
    lower = row[:, None] >= row[None, :]
    decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    line = (which.to(tl.int64) * VALUE_HEADS + head) * CHUNK
    tl.store(scores + (line + row)[:, None] * CHUNK + row[None, :], (within * decay * scale).to(dtype))
    whole = tl.sum(tl.where(row == CHUNK - 1, total, 0.0), 0)
    left = tl.exp(total)
    tl.store(since + line + row, left)
    tl.store(until + line + row, tl.exp(whole - total))
    inverse = system
    if IS_DELTA:
        strict = tl.where(row[:, None] > row[None, :], system * decay * rate[:, None], 0.0)
        inverse = invert_unit_lower(strict, CHUNK, LEVELS, PRECISION).to(dtype)
        for start in tl.static_range(0, KEYS, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
            key = start + tl.arange(0, WIDTH)[None, :]
            weighted = (tl.load(k + key).to(tl.float32) * (rate * left)[:, None]).to(dtype)
            made = tl.dot(inverse, weighted, input_precision=PRECISION)
            tl.store(w + (line + row)[:, None] * KEYS + key, made.to(dtype))
    for start in tl.static_range(0, VALUES, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        value = start + tl.arange(0, WIDTH)
        targets = tl.trans((tl.load(v + value[None, :]).to(tl.float32) * rate[:, None]).to(dtype))
        if IS_DELTA:
            targets = tl.dot(targets, tl.trans(inverse), input_precision=PRECISION).to(dtype)
        tl.store(added + line * VALUES + value[:, None] * CHUNK + row[None, :], targets)
    move_tails_behind(which, raw, raw_token, pool, page_elements, layer_elements, sequences, chunks, head, KEY_HEADS,
                      VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL, QUERY_AT, KEY_AT, VALUE_AT, KEYS, VALUES, CHUNK_FIELDS,
                      SEQUENCE_FIELDS)  # fmt: skip


@triton.jit
def invert_unit_lower(strict, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of the lower triangular matrix I + strict, [SIZE, SIZE]. 2^LEVELS is SIZE.

    The inverse of a block of two rows is I - strict. If two neighbouring blocks have the inverses A and B, and C is the
    block below A, then the joint inverse has -B C A there. All its numbers are at most about 1: they say how much of
    one token is left in another, and no step enlarges a state. So float16 is as exact as tf32. It is used unless
    PRECISION is float32's.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    dtype: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16  # pyright: ignore[reportAssignmentType]
    inverse = tl.where(row == column, 1.0, tl.where((row >> 1) == (column >> 1), 0.0 - strict, 0.0))
    for level in tl.static_range(1, LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        below = tl.where(meet(row, column, level), strict, 0.0).to(dtype)
        own = inverse.to(dtype)
        inverse -= tl.dot(tl.dot(own, below, input_precision=PRECISION).to(dtype), own, input_precision=PRECISION)
    return inverse


@triton.jit
def meet(row, column, LEVEL: tl.constexpr):
    """Whether, within a block of 2^(LEVEL + 1) rows, the row is in the second half and the column in the first."""
    later, first = row >> LEVEL, column >> LEVEL
    return (later == first + 1) & ((first & 1) == 0)
