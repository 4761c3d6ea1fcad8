"""What the tokens of a chunk do to a state whatever that is, by the inverse of a triangular matrix."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.convolution import move_tails


@triton.jit
def solve_chunks(
    mixed, log_decay, beta, w, added, scores, since, until, raw, pool, sequences, chunks,
    decay_token, beta_token, raw_token, page_elements, layer_elements, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
    SEQUENCE_FIELDS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has a value head of a chunk. WIDTH: columns of a key or a value at once. Rows of no token have β = 0,
    k = 0, and decay nothing. Tails of sequences that end here move on."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    which, head = tl.program_id(0), tl.program_id(1)
    chunk = chunks + which * CHUNK_FIELDS
    begin, end = tl.load(chunk + 1), tl.load(chunk + 2)
    row = tl.arange(0, CHUNK)
    token, inside = (begin + row).to(tl.int64), begin + row < end
    total = tl.cumsum(tl.load(log_decay + token * decay_token + head, mask=inside, other=0.0), 0)
    rate = tl.load(beta + token * beta_token + head, mask=inside, other=0.0).to(tl.float32)
    own = mixed + which.to(tl.int64) * (CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES))
    q = own + CHUNK * KEYS * (head // (VALUE_HEADS // KEY_HEADS)) + row[:, None] * KEYS
    k = q + CHUNK * KEYS * KEY_HEADS
    v = own + CHUNK * (2 * KEYS * KEY_HEADS + head * VALUES) + row[:, None] * VALUES
    within, system = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in tl.static_range(0, KEYS, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        key = start + tl.arange(0, WIDTH)[None, :]
        queries, keys = tl.load(q + key), tl.load(k + key)
        within = tl.dot(queries, tl.trans(keys), within, input_precision=PRECISION)
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
    strict = tl.where(row[:, None] > row[None, :], system * decay * rate[:, None], 0.0)
    inverse = invert_unit_lower(strict, CHUNK, BLOCK, PRECISION).to(dtype)
    decayed = (rate * left)[:, None]
    for start in tl.static_range(0, KEYS, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        key = start + tl.arange(0, WIDTH)[None, :]
        weighted = (tl.load(k + key).to(tl.float32) * decayed).to(dtype)
        made = tl.dot(inverse, weighted, input_precision=PRECISION)
        tl.store(w + (line + row)[:, None] * KEYS + key, made.to(dtype))
    for start in tl.static_range(0, VALUES, WIDTH):  # pyright: ignore[reportGeneralTypeIssues]
        value = start + tl.arange(0, WIDTH)
        targets = (tl.load(v + value[None, :]).to(tl.float32) * rate[:, None]).to(dtype)
        solved = tl.dot(tl.trans(targets), tl.trans(inverse), input_precision=PRECISION)
        places = added + line * VALUES + value[:, None] * CHUNK + row[None, :]
        tl.store(places, solved.to(dtype))
    sequence = sequences + tl.load(chunk) * SEQUENCE_FIELDS
    if end == tl.load(sequence + 3):
        tail = pool + tl.load(sequence).to(tl.int64) * page_elements + layer_elements
        count, behind = end - tl.load(sequence + 2), tl.load(sequence + 1) > 0
        last = raw + end.to(tl.int64) * raw_token
        move_tails(last, raw_token, tail, tail, head, count, behind, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL,
                   QUERY_AT, KEY_AT, VALUE_AT, KEYS, VALUES)  # fmt: skip


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
