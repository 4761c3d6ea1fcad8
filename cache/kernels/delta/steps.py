"""Decode steps of recurrent layers: convolution and state update of one token of each sequence, in two Triton kernels.

The first kernel convolves and moves the tails. The second one reads each state once, while the first one still runs,
and writes it once. A step takes about as long as this traffic.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.recurrent import RecurrentInputs, StateShape
from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.torch.delta_rule import UNIT_EPS
from tandem.cache.kernels.triton.dependent_launch import launch_options

CHANNELS, VALUES = 512, 32  # of a program: of the convolution, and columns of a state


class StepRows(NamedTuple):
    """n rows, int32 [n] each: the page, negative for padding; `behind`, 0 if the sequence has no earlier token, so that
    its page has no content yet; the page of the snapshot after the token, negative for none; and the token's index.
    tokens None: row i has token i."""

    pages: Tensor
    behind: Tensor
    kept: Tensor
    tokens: Tensor | None = None


def step_states(
    pool: Tensor, layer: int, x: RecurrentInputs, shape: StateShape, rows: StepRows, output: Tensor
) -> None:
    """Returns the outputs [T, value_heads, value_dim], contiguous, in the dtype of x.mixed; 0 for padding. It updates
    the rows' entries in place and writes snapshots.

    pool: float32 [num_pages, layers, 1, 1, 1, numbers], contiguous, see StateShape. x.mixed: any stride of tokens.
    """
    count, device, heads = rows.pages.shape[0], pool.device, Heads.of(shape)
    mixed = torch.empty((count, shape.channels), dtype=x.mixed.dtype, device=device)
    place = pool.stride(0), layer * pool.stride(1)
    kernel: Any = _step_conv[(count * cdiv(shape.channels, CHANNELS),)]
    kernel(
        *(x.mixed, x.conv, x.conv_bias, mixed, pool, *rows, x.mixed.stride(0), *place),
        *(shape.channels, shape.tail + 1, CHANNELS, rows.tokens is None),
        **launch_options(device),
    )
    block = min(VALUES, next_power_of_2(heads.value_dim))
    kernel = _step_rule[(count * heads.value_heads * cdiv(heads.value_dim, block),)]
    kernel(
        *(mixed, x.log_decay, x.strength, x.skip, output, pool, *rows, x.log_decay.stride(0), x.strength.stride(0)),
        *(*place, heads.scale, UNIT_EPS, heads.state_at, *heads, next_power_of_2(heads.key_dim), block),
        rows.tokens is None,
        **launch_options(device),
    )


@triton.jit
def _step_conv(
    mixed, conv, bias, output, pool, pages, behind, kept, tokens, mixed_token, page_elements, layer_elements,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program handles some channels of a row. No other program reads or writes their tail."""
    if PDL:
        # In this order: what the next kernel loads before its own wait is then there.
        gdc_wait()
        gdc_launch_dependents()
    parts: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // parts
    channel = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    page = tl.load(pages + row)
    stored = channel < tl.where(page >= 0, CHANNELS, 0)
    seen = channel < tl.where((page >= 0) & (tl.load(behind + row) > 0), CHANNELS, 0)
    kept_page = tl.load(kept + row)
    saved = channel < tl.where(kept_page >= 0, CHANNELS, 0)
    snapshot = pool + tl.maximum(kept_page, 0).to(tl.int64) * page_elements + layer_elements + channel
    token = row if IN_ORDER else tl.load(tokens + row)
    tail = pool + tl.maximum(page, 0).to(tl.int64) * page_elements + layer_elements + channel
    own = tl.load(mixed + token.to(tl.int64) * mixed_token + channel, mask=there, other=0.0).to(tl.float32)
    weights = conv + channel * TAPS
    total = own * tl.load(weights + (TAPS - 1), mask=there, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):  # pyright: ignore[reportGeneralTypeIssues]
        earlier = tl.load(tail + tap * CHANNELS, mask=seen, other=0.0)
        total += earlier * tl.load(weights + tap, mask=there, other=0.0).to(tl.float32)
        tl.debug_barrier()  # another thread may have loaded what this one writes over
        if tap > 0:
            tl.store(tail + (tap - 1) * CHANNELS, earlier, mask=stored)
            tl.store(snapshot + (tap - 1) * CHANNELS, earlier, mask=saved)
    if bias is not None:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(tail + (TAPS - 2) * CHANNELS, own, mask=stored)
    tl.store(snapshot + (TAPS - 2) * CHANNELS, own, mask=saved)
    tl.store(output + row.to(tl.int64) * CHANNELS + channel, silu_rounded(total, output.dtype.element_ty), mask=there)


@triton.jit
def silu_rounded(total, dtype: tl.constexpr):
    """SiLU, rounded before and after as torch does."""
    exact = total.to(dtype).to(tl.float32)
    return (exact / (1.0 + tl.exp(-exact))).to(dtype)


@triton.jit
def place_in_state(key, value, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IS_DELTA: tl.constexpr):
    """The offset of a number in a state. Its rows are key dimensions with a delta rule, otherwise value dimensions."""
    return key * VALUE_DIM + value if IS_DELTA else value * KEY_DIM + key


@triton.jit
def _step_rule(
    mixed, log_decay, strength, skip, output, pool, pages, behind, kept, tokens, decay_token, strength_token,
    page_elements, layer_elements, scale, eps, STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAIL: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, VALUE_AT: tl.constexpr, IS_DELTA: tl.constexpr,
    BY_ROW: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program handles some values of one head's state. STATE: the states' offset in an entry."""
    parts: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    row, head = tl.program_id(0) // (parts * VALUE_HEADS), tl.program_id(0) // parts % VALUE_HEADS
    key, value = tl.arange(0, KEYS), tl.program_id(0) % parts * VALUES + tl.arange(0, VALUES)
    page = tl.load(pages + row)
    entries = pool + layer_elements + STATE
    place = head * (KEY_DIM * VALUE_DIM) + place_in_state(key[:, None], value[None, :], KEY_DIM, VALUE_DIM, IS_DELTA)
    places = entries + tl.maximum(page, 0).to(tl.int64) * page_elements + place
    in_value = (value < VALUE_DIM)[None, :]
    seen = (key < tl.where((page >= 0) & (tl.load(behind + row) > 0), KEY_DIM, 0))[:, None] & in_value
    state = tl.load(places, mask=seen, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = (row if IN_ORDER else tl.load(tokens + row)).to(tl.int64)
    line = mixed + row.to(tl.int64) * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
    of_key = line + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    query = tl.load(of_key + QUERY_AT, mask=key < KEY_DIM, other=0.0).to(tl.float32)
    keys = tl.load(of_key + KEY_AT, mask=key < KEY_DIM, other=0.0).to(tl.float32)
    values = tl.load(line + VALUE_AT + head * VALUE_DIM + value, mask=value < VALUE_DIM, other=0.0).to(tl.float32)
    decays = log_decay + token * decay_token
    if BY_ROW:
        state *= tl.exp(tl.load(decays + head * KEY_DIM + key, mask=key < KEY_DIM, other=0.0))[:, None]
    else:
        state *= tl.exp(tl.load(decays + head))
    delta = values
    if IS_DELTA:
        query *= scale / tl.sqrt(tl.sum(query * query, 0) + eps)
        keys *= 1.0 / tl.sqrt(tl.sum(keys * keys, 0) + eps)
        delta = values - tl.sum(state * keys[:, None], 0)
    delta *= tl.load(strength + token * strength_token + head).to(tl.float32)
    read = tl.sum(state * query[:, None], 0)
    if skip is not None:
        read += tl.load(skip + head) * values
    stored = (key < tl.where(page >= 0, KEY_DIM, 0))[:, None] & in_value
    state += keys[:, None] * delta[None, :]
    tl.store(places, state, mask=stored)
    kept_page = tl.load(kept + row)
    saved = (key < tl.where(kept_page >= 0, KEY_DIM, 0))[:, None] & in_value
    tl.store(entries + tl.maximum(kept_page, 0).to(tl.int64) * page_elements + place, state, mask=saved)
    found = tl.where(page >= 0, read + tl.sum(query * keys, 0) * delta, 0.0)
    target = output + (token * VALUE_HEADS + head) * VALUE_DIM + value
    tl.store(target, found.to(output.dtype.element_ty), mask=value < VALUE_DIM)
