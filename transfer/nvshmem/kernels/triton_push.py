"""KV into pages of a mapped peer, and a row into its mailbox, in Triton kernels; elements are moved, never computed.

Pools are [num_pages, layers, planes, num_kv_heads, page_size, head_dim], contiguous; a peer's stores like an own one.
All functions queue on the current stream.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.transfer.regions import Region

ELEMENTS_PER_PROGRAM = 4096


def push_tokens(pool: Tensor, layer: int, k: Tensor, v: Tensor | None, tokens: Tensor, slots: Tensor) -> None:
    """Rows tokens (int64 [n]) of k and v [num_tokens, num_kv_heads, head_dim] to slots (int32 or int64 [n]) of a layer.

    k and v: any stride of the tokens, each token contiguous; v is None exactly where the pool has one plane. The slots
    lie inside the pool.
    """
    _, _, planes, heads, page_size, head_dim = pool.shape
    head_pad, dim_pad = next_power_of_2(heads), next_power_of_2(head_dim)
    block = max(1, ELEMENTS_PER_PROGRAM // (head_pad * dim_pad))
    values = k if v is None else v
    kernel: Any = _push_tokens[(cdiv(slots.shape[0], block), planes)]
    kernel(
        *(pool, k, values, tokens, slots, slots.shape[0], k.stride(0), values.stride(0)),
        *(pool.stride(0), layer * pool.stride(1)),
        *(heads, page_size, head_dim, head_pad, dim_pad, block),
    )


def push_slots(source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """All layers of source_slots (int32 [n]) of one pool to target_slots of another; both inside."""
    _, layers, planes, heads, page_size, head_dim = source.shape
    rows, dim_pad = layers * planes * heads, next_power_of_2(head_dim)
    block = min(max(1, ELEMENTS_PER_PROGRAM // dim_pad), next_power_of_2(rows))
    kernel: Any = _push_slots[(source_slots.shape[0], cdiv(rows, block))]
    kernel(source, target, source_slots, target_slots, rows, page_size, head_dim, dim_pad, block)


def push_heads(source: Tensor, target: Tensor, source_pages: Tensor, target_pages: Tensor, region: Region) -> None:
    """A region's layers and heads of source_pages (int32 [n]) to target_pages of a pool of other heads; all inside.

    Within a layer and plane of a page these heads are one span.
    """
    _, _, planes, _, page_size, head_dim = source.shape
    span = region.num_heads * page_size * head_dim
    first = region.layers.start * source.stride(1) + region.heads.start * source.stride(3)
    peer_first = region.peer_layers.start * target.stride(1) + region.peer_heads.start * target.stride(3)
    rows = region.num_layers * planes
    kernel: Any = _push_spans[(source_pages.shape[0], rows, cdiv(span, ELEMENTS_PER_PROGRAM))]
    kernel(
        *(source, target, source_pages, target_pages, first, peer_first, span),
        *(source.stride(0), source.stride(2), target.stride(0), target.stride(2), ELEMENTS_PER_PROGRAM),
    )


def post_row(mailbox: Tensor, row: int, signal: int, payload: Tensor) -> None:
    """Posts the payload (int64 []) into a mapped mailbox (int64 [2, num_signals]), then the signal.

    A later reader of the signal also sees the payload, and all that this stream wrote before.
    """
    kernel: Any = _post_row[(1,)]
    kernel(mailbox, mailbox.shape[1], row, signal, payload, num_warps=1)


@triton.jit(do_not_specialize=["num_tokens"])
def _push_tokens(
    pool, k, v, tokens, slots, num_tokens, k_stride, v_stride, page_elements, layer_elements,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = token < num_tokens
    slot = tl.load(slots + token, mask=wanted, other=0).to(tl.int64)
    row = tl.load(tokens + token, mask=wanted, other=0)
    head, dim = tl.arange(0, HEAD_PAD)[None, :, None], tl.arange(0, DIM_PAD)[None, None, :]
    mask = wanted[:, None, None] & (head < HEADS) & (dim < HEAD_DIM)
    within = head * HEAD_DIM + dim
    target = slot // PAGE_SIZE * page_elements + layer_elements + slot % PAGE_SIZE * HEAD_DIM
    offset = target[:, None, None] + head * (PAGE_SIZE * HEAD_DIM) + dim
    if tl.program_id(1) == 0:
        tl.store(pool + offset, tl.load(k + row[:, None, None] * k_stride + within, mask=mask), mask=mask)
    else:
        offset += HEADS * PAGE_SIZE * HEAD_DIM
        tl.store(pool + offset, tl.load(v + row[:, None, None] * v_stride + within, mask=mask), mask=mask)


@triton.jit
def _push_slots(
    source, target, source_slots, target_slots, num_rows,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.load(source_slots + tl.program_id(0)).to(tl.int64)
    end = tl.load(target_slots + tl.program_id(0)).to(tl.int64)
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    mask = (row < num_rows) & (dim < HEAD_DIM)
    within = row * (PAGE_SIZE * HEAD_DIM) + dim
    page_elements = num_rows * (PAGE_SIZE * HEAD_DIM)
    begin = begin // PAGE_SIZE * page_elements + begin % PAGE_SIZE * HEAD_DIM
    end = end // PAGE_SIZE * page_elements + end % PAGE_SIZE * HEAD_DIM
    tl.store(target + end + within, tl.load(source + begin + within, mask=mask), mask=mask)


@triton.jit
def _push_spans(
    source, target, source_pages, target_pages, source_first, target_first, span,
    source_page, source_row, target_page, target_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """A page has planes, one after another, of all its layers."""
    begin = tl.load(source_pages + tl.program_id(0)).to(tl.int64)
    end = tl.load(target_pages + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    begin = begin * source_page + source_first + tl.program_id(1) * source_row
    end = end * target_page + target_first + tl.program_id(1) * target_row
    tl.store(target + end + at, tl.load(source + begin + at, mask=at < span), mask=at < span)


@triton.jit(do_not_specialize=["row", "signal"])
# Typed, since Triton would take small numbers for int32.
def _post_row(mailbox, num_signals, row, signal: tl.int64, payload):  # pyright: ignore[reportInvalidTypeForm]
    tl.atomic_xchg(mailbox + num_signals + row, tl.load(payload), sem="relaxed", scope="sys")
    tl.atomic_xchg(mailbox + row, signal, sem="release", scope="sys")
