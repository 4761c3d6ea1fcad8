"""The transport between processes of one machine: every PE maps every other's segment and stores into it."""

import os
import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import plan_copy
from tandem.transfer.errors import TransportClosed, TransportError
from tandem.transfer.membership import TransportConfig, make_handle, read_handles
from tandem.transfer.page_pool import ALL_OF_THEM, PagePool, rows_for
from tandem.transfer.segment import Segment, attach_segment, create_segment, segment_detail
from tandem.transfer.transport import Fence, Int64Array, QuietFence, Transport

NAME = "shared_memory"


class SharedMemoryTransport(Transport):
    """Writes are done when the call returns, and a peer's death leaves its memory mapped: nothing here waits or faults.

    The own descriptor stays open until close(), so that peers may join at any time; when the process ends by whatever
    means, the kernel frees all that no living peer has mapped.
    """

    def __init__(self, config: TransportConfig) -> None:
        super().__init__(config)
        self._own: Segment | None = None
        self._fd = -1
        self._peers: list[Segment] = []
        self._pools: list[list[PagePool]] = []  # [pe][group]
        self._order = threading.Lock()

    def open(self) -> bytes:
        if self._own is not None:
            raise TransportError(f"PE {self.pe} is open already; open() is called once")
        self._own, self._fd = create_segment(self.config)
        return make_handle(NAME, self.config, segment_detail(self._own, self._fd))

    def join(self, handles: Sequence[bytes]) -> None:
        own = self._own
        if own is None:
            raise TransportClosed(f"PE {self.pe} is not open; join() comes after open()")
        details = read_handles(NAME, self.config, handles)
        self._peers = [
            own if pe == self.pe else attach_segment(detail, self.config.of(pe), pe)
            for pe, detail in enumerate(details)
        ]
        self._pools = [[PagePool(pool) for pool in peer.pools] for peer in self._peers]
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        self._check_peer(self.pe)
        return self._peers[self.pe].pools

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        region = self._regions[pe][group]
        target = layer if region is None else region.peer_layer(layer)
        if target is None:
            return
        keys, values = rows_for(k, v, token_indices, region)
        heads = ALL_OF_THEM if region is None else region.peer_heads
        self._pools[pe][group].put_tokens(target, slots.long(), keys, values, heads)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_peer(pe)
        plan = plan_copy(source_slots, target_slots, self.layout.paging[group].entries, self._num_slots(group))
        self._pools[pe][group].copy(self._pools[self.pe][group], plan, self._regions[pe][group])

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        self._keep_order()
        return QuietFence()

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        self._check_peer(pe)
        self._check_row(row)
        target = self._peers[pe].mailbox[row]
        target[1] = int(payload)
        self._keep_order()
        target[0] = signal

    def mailbox(self) -> Int64Array:
        self._check_peer(self.pe)
        shared = self._peers[self.pe].mailbox
        snapshot = np.empty_like(shared)
        snapshot[:, 0] = shared[:, 0]
        self._keep_order()
        snapshot[:, 1] = shared[:, 1]
        return snapshot

    def close(self) -> None:
        self._joined = False
        self._peers, self._pools, self._own = [], [], None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _keep_order(self) -> None:
        """Keeps memory accesses before it before those after it, for other processes too.

        x86 needs none: it keeps stores in order, and loads. Elsewhere an access may slip into a critical section but
        not across two of them: nothing earlier passes the first release, nothing later the second acquire, and a
        release and a following acquire of one lock stay in order. It costs 0.1 µs, so there is no branch for x86.
        """
        with self._order:
            pass
        with self._order:
            pass
