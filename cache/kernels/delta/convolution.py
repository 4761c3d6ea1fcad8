"""The convolution of several new tokens of each of several sequences, and the tails that they leave."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.steps import silu_rounded


@triton.jit
def conv_chunks(
    mixed, conv, bias, output, pool, sequences, chunks, mixed_token, page_elements, layer_elements, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    BY_ROW: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has a head of q, k or v of a chunk. Tails stay as they are: other chunks read them, too. That of a
    snapshot after the chunk is written. WIDTH: the larger of KEYS and VALUES."""
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
    of_values = VALUE_AT + (head - 2 * KEY_HEADS) * VALUE_DIM
    lead = tl.where(head < KEY_HEADS, QUERY_AT + head * KEY_DIM, KEY_AT + (head - KEY_HEADS) * KEY_DIM)
    lead = tl.where(of_keys, lead, of_values)
    width, padded = tl.where(of_keys, KEY_DIM, VALUE_DIM), tl.where(of_keys, KEYS, VALUES)
    channel, there = lead + column, column < width
    tail = pool + page * page_elements + layer_elements + channel[None, :]
    target = output + tl.program_id(0).to(tl.int64) * (CHUNK * (2 * KEY_HEADS * KEYS + VALUE_HEADS * VALUES))
    target += CHUNK * tl.where(of_keys, head * KEYS, 2 * KEY_HEADS * (KEYS - VALUES) + head * VALUES)
    dtype: tl.constexpr = output.dtype.element_ty
    for start in range(0, CHUNK, ROWS):
        row = start + tl.arange(0, ROWS)
        token = begin + row
        inside = (token < end)[:, None] & there[None, :]
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for tap in tl.static_range(TAIL + 1):  # pyright: ignore[reportGeneralTypeIssues]
            source = token - (TAIL - tap)
            new = inside & (source >= first)[:, None]
            own = tl.load(mixed + source.to(tl.int64)[:, None] * mixed_token + channel[None, :], mask=new, other=0.0)
            weight = tl.load(conv + channel * (TAIL + 1) + tap, mask=there, other=0.0).to(tl.float32)
            total += own.to(tl.float32) * weight[None, :]
        if (behind > 0) & (begin + start < first + TAIL):
            for tap in tl.static_range(TAIL):  # pyright: ignore[reportGeneralTypeIssues]
                source = token - (TAIL - tap)
                old = inside & (source < first)[:, None]
                held = tl.load(tail + (source - first + TAIL)[:, None] * channels, mask=old, other=0.0)
                weight = tl.load(conv + channel * (TAIL + 1) + tap, mask=there, other=0.0).to(tl.float32)
                total += held * weight[None, :]
        if bias is not None:
            total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)[None, :]
        active = silu_rounded(total, dtype).to(tl.float32)
        if IS_DELTA:
            active *= tl.where(of_keys, 1.0 / tl.sqrt(tl.sum(active * active, 1) + eps), 1.0)[:, None]
        found = tl.where(inside, active, 0.0).to(dtype)
        tl.store(target + row[:, None] * padded + column[None, :], found, mask=(column < padded)[None, :])
    kept = tl.load(chunk + 3)
    if kept >= 0:
        last, own = mixed + end.to(tl.int64) * mixed_token, pool + page * page_elements + layer_elements
        snapshot = pool + kept.to(tl.int64) * page_elements + layer_elements
        _move_tail(last, mixed_token, own, snapshot, lead, width, end - first, behind > 0, channels, TAIL, WIDTH)


@triton.jit
def move_tails_behind(
    which, raw, raw_token, pool, page_elements, layer_elements, sequences, chunks, head,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, CHUNK_FIELDS: tl.constexpr, SEQUENCE_FIELDS: tl.constexpr,
):  # fmt: skip
    """Moves the tails of a chunk that ends its sequence, see move_tails. All convolutions are there."""
    chunk = chunks + which * CHUNK_FIELDS
    sequence, end = sequences + tl.load(chunk) * SEQUENCE_FIELDS, tl.load(chunk + 2)
    if end == tl.load(sequence + 3):
        tail = pool + tl.load(sequence).to(tl.int64) * page_elements + layer_elements
        count, behind = end - tl.load(sequence + 2), tl.load(sequence + 1) > 0
        last = raw + end.to(tl.int64) * raw_token
        move_tails(last, raw_token, tail, tail, head, count, behind, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL,
                   QUERY_AT, KEY_AT, VALUE_AT, KEYS, VALUES)  # fmt: skip


@triton.jit
def move_tails(
    last, raw_token, tail, target, head, count, behind,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Moves the channels of a value head. The first value head of a key head also moves that key head's channels. See
    _move_tail."""
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    _move_tail(last, raw_token, tail, target, VALUE_AT + head * VALUE_DIM, VALUE_DIM, count, behind,
               channels, TAIL, VALUES)  # fmt: skip
    if head % (VALUE_HEADS // KEY_HEADS) == 0:
        own = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        _move_tail(last, raw_token, tail, target, QUERY_AT + own, KEY_DIM, count, behind, channels, TAIL, KEYS)
        _move_tail(last, raw_token, tail, target, KEY_AT + own, KEY_DIM, count, behind, channels, TAIL, KEYS)


@triton.jit
def _move_tail(
    last, raw_token, tail, target, channel, width, count, behind,
    CHANNELS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves `width` channels, from `channel` on, of a sequence with `count` new tokens. The tail with these tokens
    becomes `target`, which may be the tail itself. `last` points after the last new token."""
    column = tl.arange(0, BLOCK)
    for place in tl.static_range(TAIL):  # pyright: ignore[reportGeneralTypeIssues]
        back = TAIL - place
        own = last - back * raw_token.to(tl.int64) + channel + column
        new = tl.load(own, mask=column < tl.where(count >= back, width, 0), other=0.0).to(tl.float32)
        from_tail = tail + (count + place) * CHANNELS + channel + column
        old = tl.load(from_tail, mask=column < tl.where((count < back) & behind, width, 0), other=0.0)
        tl.debug_barrier()  # another thread may have loaded what this one writes over
        tl.store(target + place * CHANNELS + channel + column, new + old, mask=column < width)
