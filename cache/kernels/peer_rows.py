"""Finds the rows in mapped pools of peers where the append kernels store a forward's tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.base import PeerPool
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.tables import Send


def peer_rows(num_tokens: int, sends: Sequence[Send], peer_pool: PeerPool) -> tuple[NDArray[np.int64], list[Send]]:
    """Returns AppendTargets.peer_rows, int64 [num_tokens], and the remaining sends, to peers that are not mapped.

    Slots come from a mark, which was refused if its peer's pool lacked any of them.
    """
    addresses = np.zeros(num_tokens, np.int64)
    left: list[Send] = []
    for send in sends:
        pool = peer_pool(send.target_pe) if send.token_indices.shape[0] else None
        if pool is None:
            left.append(send)
            continue
        addresses[send.token_indices.numpy()] = _row_addresses(pool, send.token_slots.numpy())
        if send.source_slots.size:
            left.append(replace(send, token_indices=send.token_indices[:0], token_slots=send.token_slots[:0]))
    return addresses, left


def _row_addresses(pool: Tensor, slots: Int32Array) -> NDArray[np.int64]:
    pages, offsets = np.divmod(slots.astype(np.int64), pool.shape[4])
    return pool.data_ptr() + (pages * pool.stride(0) + offsets * pool.stride(4)) * pool.element_size()
