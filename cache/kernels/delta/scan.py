"""Advances states from chunk to chunk, and reads them by the queries."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.steps import place_in_state


@triton.jit
def scan_chunks(
    mixed, w, added, scores, since, until, skip, output, pool, sequences, chunks, page_elements, layer_elements, scale,
    STATE: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, IS_DELTA: tl.constexpr, BY_ROW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, WIDTH: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program handles WIDTH values of one head's state of a sequence. STATE: the states' offset in an entry. The
    state and what chunks add to it stay in registers from the first chunk to the last. They are the register operand of
    all products. The other operand comes from shared memory."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence, head = sequences + tl.program_id(2) * SEQUENCE_FIELDS, tl.program_id(1)
    # In 64 bits, places differ by constants that a load or store has in itself; in 32 each has registers of its own.
    row, key = tl.arange(0, CHUNK).to(tl.int64), tl.arange(0, KEYS).to(tl.int64)
    value = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH).to(tl.int64)
    entries = pool + layer_elements + STATE + head * (KEY_DIM * VALUE_DIM)
    place = place_in_state(key[None, :], value[:, None], KEY_DIM, VALUE_DIM, IS_DELTA)
    in_value, seen = (value < VALUE_DIM)[:, None], key < tl.where(tl.load(sequence + 1) > 0, KEY_DIM, 0)
    page = tl.load(sequence).to(tl.int64)
    state = tl.load(entries + page * page_elements + place, mask=in_value & seen[None, :], other=0.0)
    first, last = tl.load(sequence + 4).to(tl.int64), tl.load(sequence + 5).to(tl.int64)
    of_chunk: tl.constexpr = CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES)
    of_queries = CHUNK * KEYS * (head // (VALUE_HEADS // KEY_HEADS))
    of_values = CHUNK * (2 * KEYS * KEY_HEADS + head * VALUES) + row[None, :] * VALUES + value[:, None]
    of_key, of_row = row[:, None] * KEYS + key[None, :], value[:, None] * CHUNK + row[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    for chunk in range(first, last):
        line, record = chunk * VALUE_HEADS + head, chunks + chunk * CHUNK_FIELDS
        # Triton loads products' operands chunks ahead. Others are asked for here, products before they are needed.
        begin, end, kept = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        if BY_ROW:
            decay = tl.load(since + line * KEYS + key)[None, :]
        else:
            decay = tl.load(since + line * CHUNK + CHUNK - 1)
            left = tl.load(since + line * CHUNK + row)[None, :]
        own, before = mixed + chunk * of_chunk, state.to(dtype)
        if skip is not None:
            values = tl.load(own + of_values)
        update = tl.load(added + line * (VALUES * CHUNK) + of_row)
        if IS_DELTA:
            known = tl.dot(before, tl.trans(tl.load(w + line * (CHUNK * KEYS) + of_key)), input_precision=PRECISION)
            update = (update.to(tl.float32) - known).to(dtype)
        queries = tl.load(own + of_queries + of_key)
        found = tl.dot(before, tl.trans(queries), input_precision=PRECISION) * scale
        if not BY_ROW:  # else queries have the decays in them, and keys
            found *= left  # pyright: ignore[reportPossiblyUnboundVariable]
        within = tl.load(scores + line * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :])
        found = tl.dot(update, tl.trans(within), found, input_precision=PRECISION)
        if skip is not None:
            found += values.to(tl.float32) * tl.load(skip + head)  # pyright: ignore[reportPossiblyUnboundVariable]
        places = output + ((begin + row[None, :]) * VALUE_HEADS + head) * VALUE_DIM + value[:, None]
        tl.store(places, found.to(dtype), mask=in_value & (begin + row < end)[None, :])
        if not BY_ROW:
            update = (update.to(tl.float32) * tl.load(until + line * CHUNK + row)[None, :]).to(dtype)
        keys = tl.load(own + of_queries + CHUNK * KEYS * KEY_HEADS + of_key)
        state = tl.dot(update, keys, state * decay, input_precision=PRECISION)
        if kept >= 0:
            snapshot = entries + kept.to(tl.int64) * page_elements
            tl.store(snapshot + place, state, mask=in_value & (key < KEY_DIM)[None, :])
    tl.store(entries + page * page_elements + place, state, mask=in_value & (key < KEY_DIM)[None, :])
