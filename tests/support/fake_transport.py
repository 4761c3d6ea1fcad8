"""Several PEs in one process, for tests: writes land late, out of order, or not at all, as a test asks."""

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import check_slots, plan_copy
from tandem.transfer.errors import PeerGone, TransportClosed, TransportError
from tandem.transfer.membership import TransportConfig, make_handle, read_handles
from tandem.transfer.page_pool import ALL_OF_THEM, PagePool, rows_for
from tandem.transfer.regions import Region
from tandem.transfer.transport import Fence, Int64Array, Transport

NAME = "fake"

Write = Callable[[], None]

CALLS = ("write_tokens", "write_slots", "fence", "is_quiet", "post")
PAUSE_SECONDS = 60.0  # longer than any test waits


@dataclass(frozen=True, eq=False)
class _Issued:
    """A write or a post on its way. number counts all writes and posts of the fabric in the order of their calls."""

    number: int
    sender: int
    land: Write


@dataclass
class _Memory:
    """The memory that one PE offers to the others, and the writes on their way there."""

    pools: list[PagePool]
    mailbox: Int64Array
    in_flight: list[_Issued] = field(default_factory=list)
    posts: list[_Issued] = field(default_factory=list)
    held: bool = False
    alive: bool = True
    corrupt: int = 0  # how many of the next writes land with a bit wrong

    @classmethod
    def make(cls, config: TransportConfig) -> "_Memory":
        layout = config.layout
        shapes = [(count, *layout.page_shape(group)) for group, count in enumerate(config.num_pages)]
        dtypes = map(layout.stored_dtype_of, range(len(shapes)))
        pools = [PagePool(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return cls(pools, np.zeros((config.num_signals, 2), np.int64))


class Pause:
    """A call that was made to wait. If the test forgets it, it goes on after PAUSE_SECONDS."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.entered = threading.Event()
        self._resumed = threading.Event()

    def hold(self) -> None:
        self.entered.set()
        self._resumed.wait(PAUSE_SECONDS)

    def resume(self) -> None:
        self._resumed.set()


class FakeFabric:
    """An island of fake transports, and the faults that a test wants. Calls may come from any thread.

    A write lands when a later fence is asked or a later post is made, earlier only when the test delivers it, and in an
    order drawn from `seed`; write_slots reads its source when it lands. num_pages: per layer group, or of each. layout:
    of all PEs, or of each.
    """

    def __init__(
        self,
        num_pes: int,
        layout: KVLayout | tuple[KVLayout, ...],
        *,
        num_pages: int | tuple[int, ...],
        num_signals: int = 8,
        island: str = "fake",
        epoch: int = 1,
        seed: int = 0,
    ) -> None:
        layouts, first = ((), layout) if isinstance(layout, KVLayout) else (layout, layout[0])
        counts = (num_pages,) * len(first.groups) if isinstance(num_pages, int) else num_pages
        config = TransportConfig(0, num_pes, first, counts, num_signals, island, epoch, layouts=layouts)
        self.configs = [config.of(pe) for pe in range(num_pes)]
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._numbers = count()
        self._failures: defaultdict[tuple[str, int], list[Exception]] = defaultdict(list)  # by call and PE
        self._pauses: defaultdict[tuple[str, int], list[Pause]] = defaultdict(list)
        self._memories = [_Memory.make(config) for config in self.configs]

    def transport(self, pe: int) -> "FakeTransport":
        """The transport of one PE, not open yet."""
        return FakeTransport(self, self.configs[pe])

    def joined(self) -> list["FakeTransport"]:
        """The transports of all PEs, opened and joined."""
        transports = [self.transport(config.pe) for config in self.configs]
        handles = [transport.open() for transport in transports]
        for transport in transports:
            transport.join(handles)
        return transports

    def hold(self, pe: int) -> None:
        """Holds back everything for that PE, posts included; no fence towards it is quiet."""
        with self._lock:
            self._memories[pe].held = True

    def num_in_flight(self, pe: int) -> int:
        """Writes towards that PE that have not landed."""
        with self._lock:
            return len(self._memories[pe].in_flight)

    def deliver(self, pe: int, num_writes: int | None = None) -> int:
        """Lands some writes (all by default) at that PE, drawn at random, held or not. Returns how many were in
        flight."""
        with self._lock:
            in_flight = self._memories[pe].in_flight
            present = len(in_flight)
            self._land(in_flight, present if num_writes is None else min(num_writes, present))
            return present

    def release(self, pe: int) -> None:
        """Ends hold(): the posts held back land, after earlier writes; other writes wait as before."""
        with self._lock:
            memory = self._memories[pe]
            memory.held = False
            for post in memory.posts:
                self._land_before(memory, post.sender, post.number)
                post.land()
            memory.posts.clear()

    def fail_next(self, call: str, pe: int, error: Exception | None = None) -> None:
        """Makes the next write_tokens, write_slots, fence, is_quiet or post towards that PE raise and do nothing."""
        _check_call(call)
        with self._lock:
            self._failures[call, pe].append(error or TransportError(f"{call} to PE {pe} was made to fail"))

    def pause_next(self, call: str, pe: int, skip: int = 0) -> Pause:
        """Makes the next such call towards that PE, after `skip` others, wait in its thread until the test resumes
        it."""
        _check_call(call)
        with self._lock:
            self._pauses[call, pe].append(Pause(skip))
            return self._pauses[call, pe][-1]

    def corrupt_next(self, pe: int) -> None:
        """Makes the next write towards that PE land with one bit wrong."""
        with self._lock:
            self._memories[pe].corrupt += 1

    def kill(self, pe: int) -> None:
        """The PE's process ends: its own calls raise, some of its writes in flight land and the rest never do.

        Writes towards it go nowhere without an error, as with NVSHMEM.
        """
        with self._lock:
            self._memories[pe].alive = False
            for memory in self._memories:
                lost = [write for write in memory.in_flight if write.sender == pe]
                memory.in_flight[:] = [write for write in memory.in_flight if write.sender != pe]
                memory.posts[:] = [post for post in memory.posts if post.sender != pe]
                self._land(lost, self._random.randint(0, len(lost)))

    def _land(self, writes: list[_Issued], num_writes: int) -> None:
        self._random.shuffle(writes)
        for _ in range(num_writes):
            writes.pop().land()

    def _land_before(self, memory: _Memory, sender: int, number: int) -> None:
        """Lands what that sender issued towards `memory` before `number`. Nothing lands in a PE that was killed."""
        mine = [write for write in memory.in_flight if write.sender == sender and write.number < number]
        memory.in_flight[:] = [write for write in memory.in_flight if write not in mine]
        self._land(mine, len(mine) if memory.alive else 0)

    @contextmanager
    def _call(self, call: str, sender: int, pe: int) -> Iterator[_Memory]:
        """Yields the memory of `pe`, to this call alone. Before that the call waits, or raises, if the test asked for
        it."""
        self._wait(call, pe)
        with self._lock:
            if not self._memories[sender].alive:
                raise TransportClosed(f"PE {sender} was killed")
            if self._failures[call, pe]:
                raise self._failures[call, pe].pop(0)
            yield self._memories[pe]

    def _wait(self, call: str, pe: int) -> None:
        with self._lock:
            pauses = self._pauses[call, pe]
            if not pauses:
                return
            if pauses[0].skip:
                pauses[0].skip -= 1
                return
            pause = pauses.pop(0)
        pause.hold()

    def _write(self, call: str, sender: int, pe: int, writes: Sequence[Write], entry: Tensor) -> None:
        """entry: something that the writes set, of which a bit is turned when they are to be corrupt."""
        with self._call(call, sender, pe) as memory:
            if memory.corrupt:
                memory.corrupt -= 1
                writes = [partial(_run_and_turn_bit, writes, entry)]
            if memory.alive:
                memory.in_flight += [_Issued(next(self._numbers), sender, write) for write in writes]

    def _post(self, sender: int, pe: int, post: Write) -> None:
        with self._call("post", sender, pe) as memory:
            number = next(self._numbers)
            if memory.held:
                memory.posts.append(_Issued(number, sender, post))
            elif memory.alive:
                self._land_before(memory, sender, number)
                post()

    def _is_quiet(self, sender: int, pe: int, number: int) -> bool:
        with self._call("is_quiet", sender, pe) as memory:
            if memory.held and memory.alive:
                return False
            self._land_before(memory, sender, number)
            return True


@dataclass(frozen=True, eq=False)
class FakeFence:
    """A mark in the order of all calls of a fabric."""

    fabric: FakeFabric
    sender: int
    pe: int
    number: int

    def is_quiet(self) -> bool:
        return self.fabric._is_quiet(self.sender, self.pe, self.number)


class FakeTransport(Transport):
    """One PE of a FakeFabric. quiet() asks once: what a test holds back does not come by waiting."""

    quiet_seconds = 0.0

    def __init__(self, fabric: FakeFabric, config: TransportConfig) -> None:
        super().__init__(config)
        self._fabric = fabric

    def open(self) -> bytes:
        return make_handle(NAME, self.config, {})

    def join(self, handles: Sequence[bytes]) -> None:
        read_handles(NAME, self.config, handles)
        for pe, memory in enumerate(self._fabric._memories):
            if not memory.alive:
                raise PeerGone(f"PE {pe} was killed")
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        self._check_peer(self.pe)
        return tuple(pool.pool for pool in self._pools(self.pe))

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        if not len(slots):
            return
        self._check_token_slots(group, slots)
        pool, region = self._pools(pe)[group], self._regions[pe][group]
        target = layer if region is None else region.peer_layer(layer)
        if target is None:
            return
        rows, (keys, values) = slots.long().clone(), rows_for(k, v, token_indices, region)
        heads = ALL_OF_THEM if region is None else region.peer_heads
        write = partial(pool.put_tokens, target, rows, keys, values, heads)
        self._fabric._write("write_tokens", self.pe, pe, [write], self._entry(pool, region, target, int(rows[0])))

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_peer(pe)
        size, limit = self.layout.paging[group].entries, self._num_slots(group)
        check_slots("source_slots", source_slots, limit)
        check_slots("target_slots", target_slots, limit)
        if not target_slots.size:
            return
        source, pool = self._pools(self.pe)[group], self._pools(pe)[group]
        parts = [
            plan_copy(source_slots[part], target_slots[part], size, limit) for part in _page_sized(target_slots, size)
        ]
        region = self._regions[pe][group]
        if region is not None and region.is_empty:
            return
        writes = [partial(pool.copy, source, part, region) for part in parts]
        first = 0 if region is None else region.peer_layers.start
        self._fabric._write("write_slots", self.pe, pe, writes, self._entry(pool, region, first, int(target_slots[0])))

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        with self._fabric._call("fence", self.pe, pe):
            return FakeFence(self._fabric, self.pe, pe, next(self._fabric._numbers))

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        self._check_peer(pe)
        self._check_row(row)
        mailbox = self._fabric._memories[pe].mailbox
        self._fabric._post(self.pe, pe, partial(mailbox.__setitem__, row, (signal, int(payload))))

    def mailbox(self) -> Int64Array:
        self._check_peer(self.pe)
        with self._fabric._call("mailbox", self.pe, self.pe) as memory:
            return memory.mailbox.copy()

    def close(self) -> None:
        self._joined = False

    def _entry(self, pool: PagePool, region: Region | None, layer: int, slot: int) -> Tensor:
        page, offset = divmod(slot, pool.pool.shape[4])
        return pool.pool[page, layer, 0, 0 if region is None else region.peer_heads.start, offset]

    def _pools(self, pe: int) -> list[PagePool]:
        return self._fabric._memories[pe].pools


def _check_call(call: str) -> None:
    if call not in CALLS:
        raise ValueError(f"call is {call!r}; it must be one of {', '.join(CALLS)}")


def _run_and_turn_bit(writes: Sequence[Write], entry: Tensor) -> None:
    for write in writes:
        write()
    entry.view(torch.uint8)[0] ^= 1


def _page_sized(slots: Int32Array, page_size: int) -> list[slice]:
    """Cuts slots where the page changes, so that a copy lands page by page."""
    cuts = [0, *(np.flatnonzero(np.diff(slots // page_size)) + 1).tolist(), slots.size]
    return [slice(begin, end) for begin, end in pairwise(cuts) if begin < end]
