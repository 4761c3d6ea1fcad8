"""The states of sequences as entries of a page each: how a forward finds them, and how they are sent."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.tables import PageTables, Send, TokenLayout

NO_TOKENS, NO_SLOTS = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)


def entry_of_each(tokens: TokenLayout) -> TokenLayout:
    """The only entry of each of the B sequences of a forward, in place of its tokens."""
    count = tokens.seq_lens.size
    ones = np.ones(count, np.int32)
    return TokenLayout(np.arange(count + 1, dtype=np.int32), ones, ones - np.int32(1), np.arange(count))


def look_up_states(
    look_up: Callable[[Int64Array, TokenLayout], PageTables], rows: Int64Array, tokens: TokenLayout
) -> PageTables:
    """The tables of the only entry of each sequence. kv_last_page_len counts what is there before the new tokens: 0
    where they are the sequence's first, so that its page means nothing, else 1."""
    tables = look_up(rows, entry_of_each(tokens))
    is_behind = tokens.seq_lens > np.diff(tokens.qo_indptr)
    return replace(tables, kv_last_page_len=is_behind.astype(np.int32))


def send_states(sends: Sequence[Send], tokens: TokenLayout, pages: Int32Array) -> tuple[Send, ...]:
    """Sends of a group whose slots are pages: a new token that is sent is the last of its sequence, and its state goes
    page to page. pages: int32 [B], of the sequences."""
    return tuple(
        replace(
            send,
            token_indices=NO_TOKENS,
            token_slots=NO_SLOTS,
            source_slots=np.concatenate((send.source_slots, pages[tokens.owners[send.token_indices.numpy()]])),
            target_slots=np.concatenate((send.target_slots, send.token_slots.numpy())),
        )
        for send in sends
    )
