"""The contract of a transport: one-sided writes from this PE into the memory of its island's PEs.

                 PE 0 (prefill)                        PE 1 (decode)
control plane    open() → handle ───────┐       ┌───── open() → handle
                 join([h0, h1]) ◄───────┴───────┴────► join([h0, h1])
                 cut(1), offer(1, e) → handle ────►    a process that replaces it: open(), join()
                 reach(1, handle), admit(1)
data             write_slots(1, …) ────────────────►   pools
                 write_tokens(1, …) ───────────────►   pools
                 post(1, row, signal, payload)  ───►   mailbox(), read each step: all writes have arrived
                 fence(1).is_quiet()                   (the sender may reuse its source memory)
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import load_page_runs
from tandem.transfer.errors import TransportClosed, TransportError, TransportTimeout
from tandem.transfer.membership import TransportConfig


class Fence(Protocol):
    """A mark after all writes and posts to one PE so far."""

    def is_quiet(self) -> bool:
        """Whether they are all visible there, and their sources can be reused. Never waits. Raises as writes do."""
        ...


class QuietFence:
    """The fence of a transport whose writes are complete when the call returns."""

    def is_quiet(self) -> bool:
        return True


class Transport(ABC):
    """Base of all transports; a tandem.cache PageWriter. Owned by one thread, which makes every call.

    A PE writes to itself as to any other. Calls before join() or after close() raise TransportClosed; a PE, slot or
    mailbox row outside its range raises InvalidArgument or, for slots in tensors, IndexError.
    """

    quiet_seconds = 30.0  # longest wait of quiet()
    silent_seconds = 0.0  # how long a link to a peer may be down before writes to it fail
    elastic = False  # whether cut(), offer(), reach() and admit() can replace one peer while the others go on

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.pe = config.pe
        self.num_pes = config.num_pes
        self.layout = config.layout
        self.num_pages = config.num_pages
        self.num_signals = config.num_signals
        self.epoch = config.epoch
        self._regions = config.regions
        self.layouts = config.layouts or (config.layout,) * config.num_pes  # of each PE
        self._joined = False
        load_page_runs()  # so that no write waits for a compiler

    @abstractmethod
    def open(self) -> bytes:
        """Allocates this PE's memory, zeroed. Returns its handle, which the control plane carries to the other PEs.
        Called once."""

    @abstractmethod
    def join(self, handles: Sequence[bytes]) -> None:
        """Connects to every PE's memory. handles[i] is PE i's handle; this PE's is included. On an error nothing stays
        mapped.

        Raises MembershipRefused if a handle has another island, epoch or memory shape, and PeerGone if its process has
        ended.
        """

    @property
    @abstractmethod
    def pools(self) -> tuple[Tensor, ...]:
        """This PE's pools, one a group: [num_pages[group], *layout.page_shape(group)]. Not to be used after close()."""

    @abstractmethod
    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        """Writes rows token_indices (int64 [n]) of k and v [num_tokens, num_kv_heads, head_dim] to peer slots [n].

        A peer with another shard gets only the heads and layers that it holds. v is None for a group of one plane, see
        PageWriter. token_indices and slots are on the host. k and v may be overwritten once the call has returned (on a
        GPU: by later work on the same stream).
        """

    @abstractmethod
    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        """Writes all layers of this PE's source_slots (int32 [n]) to the peer's target_slots [n]. See write_tokens for
        shards.

        Whole pages travel in one piece. The transport may read the source until a later fence is quiet. On a GPU it
        begins after the work on the current stream, or, with `stages`, as soon as each stage is ready.
        """

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """See PageWriter. None: all writes go through write_tokens and write_slots."""
        return None

    def scratch(self, pe: int) -> int | None:
        """The address, for this process's kernels, of config.scratch_bytes in a PE's memory outside its pages. join()
        zeroes them. None: this transport maps no scratch memory."""
        return None

    @abstractmethod
    def fence(self, pe: int) -> Fence:
        """Marks all writes and posts to that PE so far, also stores that kernels made through peer_pool()."""

    def quiet(self, pe: int) -> None:
        """Waits until all earlier writes to that PE are visible there. Raises TransportTimeout after quiet_seconds."""
        fence = self.fence(pe)
        deadline = time.monotonic() + self.quiet_seconds
        while not fence.is_quiet():  # no sleep: the shortest one takes 60 µs
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"writes from PE {self.pe} to PE {pe} took more than {self.quiet_seconds:g} s; they may still land"
                )

    @abstractmethod
    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        """Writes a row of the peer's mailbox, two int64, after all earlier writes to that PE.

        A reader that sees the signal also sees the payload and the earlier writes. payload may be an int64 tensor []
        that launched work has yet to compute. The call never waits, except for that tensor if the peer's memory is not
        mapped.
        """

    @abstractmethod
    def mailbox(self) -> Int64Array:
        """int64 [num_signals, 2]: a copy of this PE's rows (signal, payload). 0 in rows without a post."""

    @property
    def lost(self) -> str:
        """Why a peer cannot be written any more in this epoch; empty if no loss is known. From any thread."""
        return ""

    def loss(self, pe: int) -> str:
        """Why that peer cannot be written any more; see `lost`. From any thread."""
        return self.lost

    def cut(self, pe: int) -> None:
        """Ends all traffic between this PE and a peer, dead or alive. After it returns, no write of the peer lands here
        any more, and nothing is read here for it. From any thread; idempotent. Raises TransportTimeout.

        Then writes and posts to the peer raise PeerGone, its fences are quiet, and `lost` does not name it. Other peers
        do not notice. See decision 0148.
        """
        raise self._not_elastic(pe)

    def offer(self, pe: int, epoch: int) -> bytes:
        """Returns a handle for the process that replaces the peer in a later epoch, after cut(). Any thread may call
        it. The next cut() ends an offer that was not admitted."""
        raise self._not_elastic(pe)

    def reach(self, pe: int, handle: bytes) -> None:
        """Connects to the memory of the process that replaces the peer, after offer(). Any thread may call it. Raises
        as join() does."""
        raise self._not_elastic(pe)

    def admit(self, pe: int) -> None:
        """Makes calls for `pe` go to the new process from now on, after reach(). The owner has ended everything for the
        process that it replaces."""
        raise self._not_elastic(pe)

    @abstractmethod
    def close(self) -> None:
        """Releases all memory; idempotent. This PE's own memory lives until its last tensor and its last peer end."""

    def _not_elastic(self, pe: int) -> TransportError:
        return TransportError(f"PE {pe} cannot be replaced: the peers of {type(self).__name__} stay for an epoch")

    def _check_peer(self, pe: int) -> None:
        if not self._joined:
            raise TransportClosed(f"PE {self.pe} has not joined island {self.config.island!r}, or has left it")
        if not 0 <= pe < self.num_pes:
            raise InvalidArgument(f"pe is {pe}; it must be from 0 to {self.num_pes - 1}")

    def _num_slots(self, group: int) -> int:
        return self.num_pages[group] * self.layout.paging[group].entries

    def _check_token_slots(self, group: int, slots: Tensor) -> None:
        """IndexError unless `slots`, one at least, are in the group's pools."""
        first, last, limit = int(slots.min()), int(slots.max()), self._num_slots(group)
        if first < 0 or last >= limit:
            raise IndexError(f"slots are {first} … {last}; they must be from 0 to {limit - 1}")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_signals:
            raise InvalidArgument(f"row is {row}; it must be from 0 to {self.num_signals - 1}")
