"""The contract of a transport: one-sided writes from this PE into the memory of the PEs of its island.

                 PE 0 (prefill)                        PE 1 (decode)
control plane    open() → handle ───────┐       ┌───── open() → handle
                 join([h0, h1]) ◄───────┴───────┴────► join([h0, h1])
                 cut(1), offer(1, e) → handle ────►    a new process in its place: open(), join()
                 reach(1, handle), admit(1)
data             write_slots(1, …) ────────────────►   pools
                 write_tokens(1, …) ───────────────►   pools
                 post(1, row, signal, payload)  ───►   mailbox(), read each step: all of it is there
                 fence(1).is_quiet()                   (the sender may reuse what it wrote from)
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
    """A mark behind the writes and posts to one PE that were issued before it."""

    def is_quiet(self) -> bool:
        """Whether all of them are visible there, and their sources free; never waits. Raises as writes do."""
        ...


class QuietFence:
    """The fence of a transport whose writes are done when their call returns."""

    def is_quiet(self) -> bool:
        return True


class Transport(ABC):
    """Base of all transports; a tandem.cache PageWriter. Owned by one thread, which makes every call.

    A PE writes to itself as to any other. Calls before join() or after close() raise TransportClosed; a PE, slot or
    mailbox row outside its range raises InvalidArgument or, for slots in tensors, IndexError.
    """

    quiet_seconds = 30.0  # longest wait of quiet()
    silent_seconds = 0.0  # for so long a link to a peer may be down, and writes then go on
    elastic = False  # whether cut(), offer(), reach() and admit() replace one peer while the others go on

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
        """Makes this PE's memory, zeroed; its handle, for the control plane to carry to the other PEs. Called once."""

    @abstractmethod
    def join(self, handles: Sequence[bytes]) -> None:
        """Reaches every PE's memory; handles[i] is PE i's, its own included. On an error nothing stays mapped.

        MembershipRefused when a handle is of another island, epoch or memory shape; PeerGone when its process ended.
        """

    @property
    @abstractmethod
    def pools(self) -> tuple[Tensor, ...]:
        """The own pools: [num_pages[group], *layout.page_shape(group)] of each. Not to be used after close()."""

    @abstractmethod
    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        """Rows token_indices (int64 [n]) of k and v [num_tokens, num_kv_heads, head_dim] to the peer's slots [n].

        To a peer of another shard go the heads that it holds, and nothing of a layer that it does not hold.
        v is None for a group of one plane, see PageWriter. token_indices and slots are on the host. k and v may be
        overwritten once the call returned (on a GPU: by later work of the same stream).
        """

    @abstractmethod
    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        """All layers of the own source_slots (int32 [n]) to the peer's target_slots [n]; see write_tokens for shards.

        Whole pages travel as such. The source may be read until a later fence is quiet, on a GPU behind all that is on
        the current stream, or as soon as `stages`, if there are any, say.
        """

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """See PageWriter. None: all goes through write_tokens and write_slots."""
        return None

    def scratch(self, pe: int) -> int | None:
        """The address, for kernels of this process, of config.scratch_bytes of a PE's memory beside its pages, which
        join() has zeroed. None: this transport maps none."""
        return None

    @abstractmethod
    def fence(self, pe: int) -> Fence:
        """Marks what has been issued towards that PE so far, stores of kernels through peer_pool() included."""

    def quiet(self, pe: int) -> None:
        """Waits for a fence: all earlier writes to that PE are visible there. TransportTimeout at a deadline."""
        fence = self.fence(pe)
        deadline = time.monotonic() + self.quiet_seconds
        while not fence.is_quiet():  # no sleep: the shortest one takes 60 µs
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"writes from PE {self.pe} to PE {pe} took more than {self.quiet_seconds:g} s; they may still land"
                )

    @abstractmethod
    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        """Writes a row of the peer's mailbox, int64 each, behind all writes issued to that PE before.

        A reader that sees the signal also sees the payload and what those writes wrote. payload: may be an int64 tensor
        [] that gets its value from what is launched so far. Never waits, except for that tensor where the peer's memory
        is not mapped.
        """

    @abstractmethod
    def mailbox(self) -> Int64Array:
        """int64 [num_signals, 2], a copy of the own rows (signal, payload); 0 where nothing was ever posted."""

    @property
    def lost(self) -> str:
        """Why a peer cannot be written any more in this epoch; empty where none is known lost. From any thread."""
        return ""

    def loss(self, pe: int) -> str:
        """Why that peer cannot be written any more; see `lost`. From any thread."""
        return self.lost

    def cut(self, pe: int) -> None:
        """Ends all between this PE and a peer, dead or alive: when it returns, nothing that the peer has written lands
        here any more, and nothing is read here for it. From any thread; idempotent. TransportTimeout.

        Then writes and posts to the peer raise PeerGone, fences are quiet, and `lost` does not speak of it. Others do
        not notice. See decision 0148.
        """
        raise self._not_elastic(pe)

    def offer(self, pe: int, epoch: int) -> bytes:
        """After cut(): a handle for the process that takes the peer's place in a later epoch, of its own. From any
        thread. An offer that was not admitted ends with the next cut()."""
        raise self._not_elastic(pe)

    def reach(self, pe: int, handle: bytes) -> None:
        """After offer(): reaches the memory of the process that has taken the peer's place. From any thread. Raises
        as join()."""
        raise self._not_elastic(pe)

    def admit(self, pe: int) -> None:
        """After reach(): from now on calls go to that process. The owner has ended all that it did for the one
        before."""
        raise self._not_elastic(pe)

    @abstractmethod
    def close(self) -> None:
        """Releases all memory; idempotent. The own memory goes with the last tensor over it and the last peer."""

    def _not_elastic(self, pe: int) -> TransportError:
        return TransportError(f"PE {pe} cannot be replaced: the peers of {type(self).__name__} stay for an epoch")

    def _check_peer(self, pe: int) -> None:
        if not self._joined:
            raise TransportClosed(f"PE {self.pe} has not joined island {self.config.island!r}, or has left it")
        if not 0 <= pe < self.num_pes:
            raise InvalidArgument(f"pe is {pe}; 0 … {self.num_pes - 1} are accepted")

    def _num_slots(self, group: int) -> int:
        return self.num_pages[group] * self.layout.paging[group].entries

    def _check_token_slots(self, group: int, slots: Tensor) -> None:
        """IndexError unless `slots`, one at least, are in the group's pools."""
        first, last, limit = int(slots.min()), int(slots.max()), self._num_slots(group)
        if first < 0 or last >= limit:
            raise IndexError(f"slots are {first} … {last}; 0 … {limit - 1} are accepted")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_signals:
            raise InvalidArgument(f"row is {row}; 0 … {self.num_signals - 1} are accepted")
