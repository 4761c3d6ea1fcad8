"""Verify steps of recurrent layers, in Triton kernels: all drafted tokens first, then the accepted ones again.

    _run_conv   keeps the tokens' inputs, and convolves them     a program: a token and some channels
    _run_rule   o, tails and states from the kept inputs         a program: a sequence, and columns of one head's state

In the verify step both kernels run for each layer. Afterwards _run_rule alone advances the states of all layers by the
accepted tokens, in one launch.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.convolution import move_tails
from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.delta.steps import CHANNELS, VALUES, place_in_state, silu_rounded
from tandem.cache.kernels.recurrent import RecurrentInputs, StateShape
from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.torch.delta_rule import UNIT_EPS
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.arrays import Int64Array


class RunRows(NamedTuple):
    """StepRows of n tokens, and how many tokens just before each one belong to the same sequence; int32 [n] each."""

    pages: Tensor
    behind: Tensor
    kept: Tensor
    preceding: Tensor


class KeptInputs(NamedTuple):
    """The inputs of n tokens to L layers: raw and mixed [L, n, channels], before and after the convolution, in the
    model's dtype; log_decay [L, n, *decays] and strength [L, n, heads], float32."""

    raw: Tensor
    mixed: Tensor
    log_decay: Tensor
    strength: Tensor

    @classmethod
    def of(
        cls, num_layers: int, num_tokens: int, shape: StateShape, dtype: torch.dtype, device: torch.device
    ) -> "KeptInputs":
        """Allocates tensors without values."""
        each = num_layers, num_tokens
        raw, mixed = (torch.empty((*each, shape.channels), dtype=dtype, device=device) for _ in range(2))
        rates = ((*each, *shape.decays), (*each, shape.heads))
        return cls(raw, mixed, *(torch.empty(size, dtype=torch.float32, device=device) for size in rates))

    def part(self, layers: slice, tokens: slice) -> "KeptInputs":
        return KeptInputs(*(numbers[layers, tokens] for numbers in self))


@dataclass(eq=False)
class Runs:
    """The tokens of one verify step; in graph buffers, of the latest. begins: int64 [B], the first token of
    each sequence. kept: None until the first layer has run."""

    rows: RunRows
    begins: Int64Array
    kept: KeptInputs | None = None

    def run(self, pool: Tensor, layer: int, x: RecurrentInputs, shape: StateShape, output: Tensor) -> None:
        """Computes step_states for tokens 0, 1, … in order."""
        if self.kept is None:
            self.kept = KeptInputs.of(pool.shape[1], x.mixed.shape[0], shape, x.mixed.dtype, pool.device)
        kept = self.kept.part(slice(layer, layer + 1), slice(None))
        _keep_inputs(pool, layer, x, shape, self.rows, kept)
        _advance(pool, layer, kept, shape, self.rows, output, x.skip)

    def run_again(self, pool: Tensor, sequence: int, count: int, shape: StateShape, rows: RunRows) -> None:
        """Advances all layers by the first `count` tokens of a sequence, without outputs. rows: of the tokens."""
        assert self.kept is not None, "the step comes first"
        begin = int(self.begins[sequence])
        _advance(pool, 0, self.kept.part(slice(None), slice(begin, begin + count)), shape, rows, None)


def again_rows(page: int, count: int) -> list[np.ndarray]:
    """The arrays of RunRows for `count` tokens of the sequence in `page`, without snapshots."""
    of_all = (np.full(count, value, np.int32) for value in (page, 1, -1))
    return [*of_all, np.arange(count, dtype=np.int32)]


def _keep_inputs(
    pool: Tensor, layer: int, x: RecurrentInputs, shape: StateShape, rows: RunRows, kept: KeptInputs
) -> None:
    count, parts, decays = rows.pages.shape[0], cdiv(shape.channels, CHANNELS), math.prod(shape.decays)
    kernel: Any = _run_conv[(count * parts,)]
    kernel(
        *(x.mixed, x.conv, x.conv_bias, x.log_decay, x.strength, *kept, pool),
        *(rows.pages, rows.behind, rows.preceding),
        *(x.mixed.stride(0), x.log_decay.stride(0), x.strength.stride(0), pool.stride(0), layer * pool.stride(1)),
        *(shape.channels, shape.tail + 1, CHANNELS, decays, next_power_of_2(cdiv(decays, parts))),
        *(shape.heads, next_power_of_2(shape.heads)),
        **launch_options(pool.device),
    )


def _advance(
    pool: Tensor,
    layer: int,
    kept: KeptInputs,
    shape: StateShape,
    rows: RunRows,
    output: Tensor | None,
    skip: Tensor | None = None,
) -> None:
    """Runs the layers in `kept`. The first is `layer`. output None: advances only the first token's sequence.
    Its page may be new, so the kernel reads nothing before all earlier work is done."""
    count, heads = rows.pages.shape[0], Heads.of(shape)
    width = next_power_of_2(heads.value_dim)
    block = min(VALUES, width)
    sequences = 1 if output is None else count
    programs = sequences * heads.value_heads * cdiv(heads.value_dim, block)
    kernel: Any = _run_rule[(programs, kept.raw.shape[0])]
    kernel(
        *(*kept, skip, output, pool, *rows, count, layer, kept.raw.stride(0), kept.raw.stride(1)),
        *(kept.log_decay.stride(0), kept.strength.stride(0), pool.stride(0), pool.stride(1)),
        *(heads.scale, UNIT_EPS, heads.state_at, *heads, next_power_of_2(heads.key_dim), width, block),
        *(next_power_of_2(count), output is not None),
        **({"PDL": False} if output is None else launch_options(pool.device)),
    )


@triton.jit
def _run_conv(
    mixed, conv, bias, log_decay, strength, kept_raw, output, kept_decay, kept_strength, pool, pages, behind,
    preceding, mixed_token, decay_token, strength_token, page_elements, layer_elements,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, DECAYS: tl.constexpr, DECAY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Leaves tails unchanged, because programs of other tokens read them, too."""
    if PDL:
        # In this order: what the next kernel loads before its own wait is then there.
        gdc_wait()
        gdc_launch_dependents()
    parts: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    token, channel = row.to(tl.int64), part * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    page, before = tl.load(pages + row), tl.load(preceding + row)
    is_behind = (page >= 0) & (tl.load(behind + row - before) > 0)
    tail = pool + tl.maximum(page, 0).to(tl.int64) * page_elements + layer_elements + channel
    line = mixed + token * mixed_token + channel
    own = tl.load(line, mask=there, other=0.0)
    tl.store(kept_raw + token * CHANNELS + channel, own, mask=there)
    weights = conv + channel * TAPS
    total = own.to(tl.float32) * tl.load(weights + (TAPS - 1), mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):  # pyright: ignore[reportGeneralTypeIssues]
        back = TAPS - 1 - tap
        is_new = channel < tl.where(back <= before, CHANNELS, 0)
        is_held = channel < tl.where((back > before) & is_behind, CHANNELS, 0)
        earlier = tl.load(line - back * mixed_token.to(tl.int64), mask=is_new, other=0.0).to(tl.float32)
        earlier += tl.load(tail + (tap + before) * CHANNELS, mask=is_held, other=0.0)
        total += earlier * tl.load(weights + tap, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(output + token * CHANNELS + channel, silu_rounded(total, output.dtype.element_ty), mask=there)
    one = part * DECAY_BLOCK + tl.arange(0, DECAY_BLOCK)
    decay = tl.load(log_decay + token * decay_token + one, mask=one < DECAYS, other=0.0)
    tl.store(kept_decay + token * DECAYS + one, decay, mask=one < DECAYS)
    if part == 0:
        head = tl.arange(0, HEAD_BLOCK)
        rate = tl.load(strength + token * strength_token + head, mask=head < HEADS, other=0.0)
        tl.store(kept_strength + token * HEADS + head, rate, mask=head < HEADS)


@triton.jit
def _run_rule(
    raw, mixed, log_decay, strength, skip, output, pool, pages, behind, kept, preceding, num_rows, first_layer,
    channel_layer, channel_token, decay_layer, strength_layer, page_elements, layer_elements, scale, eps,
    STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    BY_ROW: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, FINDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The programs of a sequence's first token compute all its tokens. Programs of other tokens do nothing. ROWS: at
    least num_rows. VALUES: columns of a program. WIDTH: at least the columns of a head."""
    parts: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    row, head = tl.program_id(0) // (parts * VALUE_HEADS), tl.program_id(0) // parts % VALUE_HEADS
    part, layer = tl.program_id(0) % parts, tl.program_id(1).to(tl.int64)
    key, value = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    ahead = tl.arange(0, ROWS)
    before = tl.load(preceding + row + ahead, mask=row + ahead < num_rows, other=-1)
    count = tl.sum(tl.where(before == ahead, 1, 0), 0)  # those of later sequences have fewer before them
    page = tl.where(count > 0, tl.load(pages + row), -1)  # pyright: ignore[reportOperatorIssue]
    is_behind = (page >= 0) & (tl.load(behind + row) > 0)
    layers = pool + (first_layer + layer) * layer_elements
    tail = layers + tl.maximum(page, 0).to(tl.int64) * page_elements
    place = place_in_state(key[:, None], value[None, :], KEY_DIM, VALUE_DIM, IS_DELTA)
    place += STATE + head * (KEY_DIM * VALUE_DIM)
    in_value = (value < VALUE_DIM)[None, :]
    state = tl.load(tail + place, mask=(key < tl.where(is_behind, KEY_DIM, 0))[:, None] & in_value, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    raw += layer * channel_layer
    mixed += layer * channel_layer
    decays: tl.constexpr = VALUE_HEADS * (KEY_DIM if BY_ROW else 1)
    log_decay += layer * decay_layer + head * (KEY_DIM if BY_ROW else 1)
    strength += layer * strength_layer + head
    of_key = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    for at in range(0, count):  # pyright: ignore[reportArgumentType]
        token = (row + at).to(tl.int64)
        line = mixed + token * channel_token
        query = tl.load(line + QUERY_AT + of_key, mask=key < KEY_DIM, other=0.0).to(tl.float32)
        keys = tl.load(line + KEY_AT + of_key, mask=key < KEY_DIM, other=0.0).to(tl.float32)
        values = tl.load(line + VALUE_AT + head * VALUE_DIM + value, mask=value < VALUE_DIM, other=0.0).to(tl.float32)
        if BY_ROW:
            state *= tl.exp(tl.load(log_decay + token * decays + key, mask=key < KEY_DIM, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(log_decay + token * decays))
        delta = values
        if IS_DELTA:
            query *= scale / tl.sqrt(tl.sum(query * query, 0) + eps)
            keys *= 1.0 / tl.sqrt(tl.sum(keys * keys, 0) + eps)
            delta = values - tl.sum(state * keys[:, None], 0)
        state += keys[:, None] * (delta * tl.load(strength + token * VALUE_HEADS))[None, :]
        if FINDS:
            read = tl.sum(state * query[:, None], 0)
            if skip is not None:
                read += tl.load(skip + head) * values
            found = tl.where(page >= 0, read, 0.0)
            target = output + (token * VALUE_HEADS + head) * VALUE_DIM + value
            tl.store(target, found.to(output.dtype.element_ty), mask=value < VALUE_DIM)
        kept_page = tl.load(kept + row + at)
        snapshot = layers + tl.maximum(kept_page, 0).to(tl.int64) * page_elements
        saved = (key < tl.where(kept_page >= 0, KEY_DIM, 0))[:, None] & in_value
        tl.store(snapshot + place, state, mask=saved)
        if (part == 0) & (kept_page >= 0):
            move_tails(raw + (token + 1) * channel_token, channel_token, tail, snapshot, head, at + 1, is_behind,
                       KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL, QUERY_AT, KEY_AT, VALUE_AT,
                       KEYS, WIDTH)  # fmt: skip
    tl.store(tail + place, state, mask=(key < tl.where(page >= 0, KEY_DIM, 0))[:, None] & in_value)
    if (part == 0) & (page >= 0):
        end = (row + count).to(tl.int64)
        move_tails(raw + end * channel_token, channel_token, tail, tail, head, count, is_behind,
                   KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAIL, QUERY_AT, KEY_AT, VALUE_AT,
                   KEYS, WIDTH)  # fmt: skip
