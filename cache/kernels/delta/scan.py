"""States from chunk to chunk, and what queries read from them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def scan_chunks(
    mixed, w, added, since, until, states, pool, sequences, chunks, page_elements, layer_elements,
    STATE: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has WIDTH columns of a state, which begins at STATE in an entry, of one head of a sequence. They stay
    in registers from the first chunk to the last, as rows: both products then take them, and what is added, from there.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, head = sequences + tl.program_id(2) * SEQUENCE_FIELDS, tl.program_id(1)
    # In 64 bits, places differ by constants that a load or store has in itself; in 32 each has registers of its own.
    row, key = tl.arange(0, CHUNK).to(tl.int64), tl.arange(0, KEYS).to(tl.int64)
    value = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH).to(tl.int64)
    entries = pool + layer_elements + STATE + head * (KEY_DIM * VALUE_DIM)
    place = key[None, :] * VALUE_DIM + value[:, None]
    in_value, seen = (value < VALUE_DIM)[:, None], key < tl.where(tl.load(sequence + 1) > 0, KEY_DIM, 0)
    page = tl.load(sequence).to(tl.int64)
    state = tl.load(entries + page * page_elements + place, mask=in_value & seen[None, :], other=0.0)
    first, last = tl.load(sequence + 4).to(tl.int64), tl.load(sequence + 5).to(tl.int64)
    of_chunk: tl.constexpr = CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES)
    of_keys = CHUNK * KEYS * (KEY_HEADS + head // (VALUE_HEADS // KEY_HEADS))
    of_key, of_row = row[:, None] * KEYS + key[None, :], value[:, None] * CHUNK + row[None, :]
    of_state = value[:, None] * KEYS + key[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    decay = tl.load(since + (first * VALUE_HEADS + head) * CHUNK + CHUNK - 1)
    kept = tl.load(chunks + first * CHUNK_FIELDS + 3)
    for chunk in range(first, last):
        line, after = chunk * VALUE_HEADS + head, tl.minimum(chunk + 1, last - 1)
        next_decay = tl.load(since + (after * VALUE_HEADS + head) * CHUNK + CHUNK - 1)
        next_kept = tl.load(chunks + after * CHUNK_FIELDS + 3)
        own_added = added + line * (VALUES * CHUNK)
        before = state.to(dtype)
        tl.store(states + line * (VALUES * KEYS) + of_state, before)
        own_w = tl.load(w + line * (CHUNK * KEYS) + of_key)
        update = tl.load(own_added + of_row).to(tl.float32)
        update -= tl.dot(before, tl.trans(own_w), input_precision=PRECISION)
        tl.store(own_added + of_row, update.to(dtype))
        left = tl.load(until + line * CHUNK + row)
        keys = tl.load(mixed + chunk * of_chunk + of_keys + of_key)
        state = tl.dot((update * left[None, :]).to(dtype), keys, state * decay, input_precision=PRECISION)
        if kept >= 0:
            snapshot = entries + kept.to(tl.int64) * page_elements
            tl.store(snapshot + place, state, mask=in_value & (key < KEY_DIM)[None, :])
        decay, kept = next_decay, next_kept
    tl.store(entries + page * page_elements + place, state, mask=in_value & (key < KEY_DIM)[None, :])


@triton.jit
def read_chunks(
    mixed, added, scores, since, states, output, chunks, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, CHUNK_FIELDS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has WIDTH columns of o of one head of a chunk."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    which, head = tl.program_id(2), tl.program_id(1)
    row, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    line = which.to(tl.int64) * VALUE_HEADS + head
    q = mixed + which.to(tl.int64) * (CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES))
    q += CHUNK * KEYS * (head // (VALUE_HEADS // KEY_HEADS))
    queries = tl.load(q + row[:, None] * KEYS + key[None, :])
    state = tl.load(states + line * (VALUES * KEYS) + value[:, None] * KEYS + key[None, :])
    within = tl.load(scores + line * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :])
    update = tl.load(added + line * (VALUES * CHUNK) + value[:, None] * CHUNK + row[None, :])
    left = tl.load(since + line * CHUNK + row) * scale
    begin, end = tl.load(chunks + which * CHUNK_FIELDS + 1), tl.load(chunks + which * CHUNK_FIELDS + 2)
    found = tl.dot(queries, tl.trans(state), input_precision=PRECISION) * left[:, None]
    found = tl.dot(within, tl.trans(update), found, input_precision=PRECISION)
    token = (begin + row).to(tl.int64)
    places = output + (token[:, None] * VALUE_HEADS + head) * VALUE_DIM + value[None, :]
    inside = (begin + row < end)[:, None] & (value < VALUE_DIM)[None, :]
    tl.store(places, found.to(output.dtype.element_ty), mask=inside)
