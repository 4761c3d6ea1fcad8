"""What triton_push does, in torch: the references of its kernels, same signatures."""

from torch import Tensor

from tandem.transfer.page_pool import PagePool


def push_tokens(pool: Tensor, layer: int, k: Tensor, v: Tensor | None, tokens: Tensor, slots: Tensor) -> None:
    """Rows tokens (int64 [n]) of k and v [num_tokens, num_kv_heads, head_dim] to slots (int32 or int64 [n]) of a layer.

    v is None exactly where the pool has one plane. The slots lie inside the pool.
    """
    values = None if v is None else v.index_select(0, tokens)
    PagePool(pool).put_tokens(layer, slots.long(), k.index_select(0, tokens), values)


def push_slots(source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """All layers of source_slots (int32 [n]) of one pool to target_slots of another; both inside."""
    PagePool(target).copy_slots(PagePool(source), source_slots.long(), target_slots.long())


def post_row(mailbox: Tensor, row: int, signal: int, payload: Tensor) -> None:
    """Into a mailbox (int64 [2, num_signals]) the payload (int64 []), then the signal."""
    mailbox[0, row], mailbox[1, row] = signal, payload
