"""The LoRA adapters that a worker holds: in host memory, and as many as there are slots on the device.

read()          load()            take()                   release()
──────► reading ──────► in host memory ──────► resident, in use ──────► resident ──► another takes its slot
                          ▲                                                │
                          └────────────────────────────────────────────────┘
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument, OutOfSequences
from tandem.workers.adapters.held_adapter import HeldAdapter
from tandem.workers.adapters.peft_folder import AdapterReader, Found
from tandem.workers.config import WorkerConfig
from tandem.workers.errors import AdapterNotHeld, NoRoom
from tandem.workers.models.config import ModelConfig
from tandem.workers.weights.adapted import AdaptedWeights, AdapterRows

MOST_HELD = 4096
NO_ADAPTER = -1


class OutOfSlots(OutOfSequences):
    """Sequences use the adapters of all slots; nothing was changed."""


@dataclass(eq=False)
class _Held:
    name: str
    found: Found
    place: int  # in host memory
    slot: int | None = None
    users: int = 0  # sequences, parked ones included
    removed: bool = False


class Adapters:
    """Owned by the step thread; folders are read in a thread of its own. The same calls, in the same order, give the
    same slots.

    A sequence uses the adapter of its prompt from take() to release(). A slot whose adapter no sequence uses may be
    given to another adapter, the longest unused one first.
    """

    def __init__(self, config: ModelConfig, weights: AdaptedWeights, host_bytes: int) -> None:
        """config: of the rank's shard. host_bytes: of host memory, of this rank alone."""
        self._weights = weights
        self._reader = AdapterReader(config, weights)
        count, on_gpu = min(host_bytes // weights.slot_bytes, MOST_HELD), weights.memory.is_cuda
        self._host = torch.empty(count, weights.memory.shape[1], dtype=weights.memory.dtype, pin_memory=on_gpu)
        self._copies = torch.cuda.Stream(weights.memory.device) if on_gpu else None
        self._arriving: dict[int, torch.cuda.Event] = {}  # slots that are being copied into
        self._places = list(range(count))  # of host memory that are free, the next one last
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[int, tuple[str, int, Future[Found]]] = {}  # by number: the name, the place
        self._held: dict[bytes, _Held] = {}
        self._slots: list[bytes | None] = [None] * weights.num_slots
        self._unused = list(range(weights.num_slots))  # slots that no sequence uses, the longest unused one first
        self._users: dict[int, bytes] = {}  # the adapter of each sequence, without those that are parked
        self._parked: dict[int, bytes] = {}
        self._in_use: dict[bytes, int] = {}  # see in_use

    @property
    def rows(self) -> AdapterRows:
        """The slots of a forward's rows, which the model's layers read."""
        return self._weights.rows

    def warm_up(self) -> None:
        """Compiles what the device would else prepare at first use, so that no step waits for it."""
        self._weights.compile()

    # What is held

    def read(self, number: int, name: str, path: str) -> None:
        """Begins to read a folder; `number` names the reading. Raises NoRoom."""
        if not self._places:
            raise NoRoom(
                f"{len(self._host)} adapters of {self._weights.slot_bytes} bytes each fill adapters.host_bytes; remove "
                "one first"
            )
        place = self._places.pop()
        host, copied = self._host[place], list(self._arriving.values())

        def read() -> Found:
            for event in copied:  # the place may have been another adapter's, which is still being copied
                event.synchronize()
            return self._reader.read(Path(path), host)

        self._reading[number] = name, place, self._thread.submit(read)

    def reading(self, number: int) -> "Future[Found]":
        """Ends with what was read, or with BadAdapter."""
        return self._reading[number][2]

    @property
    def first_read(self) -> tuple[int, bytes] | None:
        """The number of the oldest reading that is neither loaded nor dropped, and the digest of what was read, b"" for
        an error. None while it is read."""
        number, (_, _, future) = next(iter(self._reading.items()), (0, ("", 0, None)))
        if future is None or not future.done():
            return None
        return number, b"" if future.exception() else future.result().digest

    def load(self, number: int, digest: bytes) -> None:
        """Waits for the reading, then lets requests use the adapter. Raises BadAdapter, and AdapterNotHeld if it has
        another digest; then the reading is as it was."""
        name, place, future = self._reading[number]
        found = future.result()
        if found.digest != digest:
            raise AdapterNotHeld(digest)
        del self._reading[number]
        known = self._held.get(digest)
        if known is None:
            self._held[digest] = _Held(name, found, place)
        else:
            self._places.append(place)
            known.name, known.removed = name, False

    def drop(self, number: int) -> None:
        """Drops a reading, done or under way. Idempotent."""
        if (reading := self._reading.pop(number, None)) is not None:
            self._places.append(reading[1])  # the next reading into this place comes afterwards, in the same thread

    def remove(self, digest: bytes) -> None:
        """Lets no new sequence use the adapter. Its memory is free once the sequences that use it have ended.
        Idempotent."""
        if (held := self._held.get(digest)) is not None:
            held.removed = True
            self._free_if_unused(digest)

    @property
    def held(self) -> tuple[HeldAdapter, ...]:
        """The adapters that are held, the oldest first."""
        size = self._weights.slot_bytes
        return tuple(
            HeldAdapter(digest, one.name, one.found.rank, size, one.slot is not None, one.users, one.removed)
            for digest, one in self._held.items()
        )

    def holds(self, digest: bytes) -> bool:
        """Returns whether new sequences may use the adapter."""
        held = self._held.get(digest)
        return held is not None and not held.removed

    # Sequences

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def in_use(self) -> Mapping[bytes, int]:
        """Returns how many sequences use each adapter that must stay in its slot, without parked ones. The adapter in
        use for longest comes first."""
        return self._in_use

    def fits(self, digest: bytes, spare: int = 0) -> bool:
        """Returns whether take() finds a slot and leaves `spare` unused ones, or fails for another reason."""
        held = self._held.get(digest)
        if held is None:
            return True
        taken = held.slot is None or held.slot in self._unused
        return len(self._unused) - taken >= spare

    def take(self, sequence: int, digest: bytes) -> None:
        """Gives the sequence the adapter. Raises AdapterNotHeld and OutOfSlots."""
        if not self.holds(digest):
            raise AdapterNotHeld(digest)
        held = self._held[digest]
        self._use(sequence, digest, held)
        held.users += 1

    def park(self, sequence: int) -> None:
        """Notes that the sequence will come back: release() keeps the adapter in host memory for it."""
        if (digest := self._users.get(sequence)) is not None:
            self._parked[sequence] = digest
            self._held[digest].users += 1

    def resume(self, sequence: int) -> None:
        """Gives a parked sequence its adapter again. Raises OutOfSlots; then the sequence stays parked."""
        if (digest := self._parked.get(sequence)) is not None:
            self._use(sequence, digest, self._held[digest])
            del self._parked[sequence]

    def stay_parked(self, sequence: int) -> None:
        """Takes resume() back."""
        if sequence in self._users:
            self.park(sequence)
            self.release(sequence)

    def forget(self, sequence: int) -> None:
        """Forgets a parked sequence that does not come back. Idempotent."""
        if (digest := self._parked.pop(sequence, None)) is not None:
            self._let_go(digest)

    def release(self, sequence: int) -> None:
        """Takes the adapter from the sequence. Idempotent."""
        digest = self._users.pop(sequence, None)
        if digest is None:
            return
        self._in_use[digest] -= 1
        if not self._in_use[digest]:
            del self._in_use[digest]
            if (slot := self._held[digest].slot) is not None:
                self._unused.append(slot)
        self._let_go(digest)

    def slots_of(self, sequences: Sequence[int] | Int64Array, counts: Int64Array | None = None) -> Int64Array | None:
        """Returns the slot of each row of a forward, int64 [T], NO_ADAPTER for a row without adapter. Returns None if
        no row has an adapter. counts: rows of each sequence; None: 1. Later launches follow the copies into these
        slots."""
        if not self._users:
            return None
        own = np.array([self._slot_of(int(sequence)) for sequence in sequences], np.int64)
        if (own == NO_ADAPTER).all():
            return None
        self._await_copies(own)
        return own if counts is None else own.repeat(counts)

    def any_uses(self, sequences: Sequence[int] | Int64Array) -> bool:
        """Returns whether one of the sequences has an adapter."""
        return bool(self._users) and any(int(sequence) in self._users for sequence in sequences)

    def close(self) -> None:
        """Waits for what is being read."""
        self._thread.shutdown(cancel_futures=True)

    def _slot_of(self, sequence: int) -> int:
        digest = self._users.get(sequence)
        slot = None if digest is None else self._held[digest].slot
        return NO_ADAPTER if slot is None else slot

    def _use(self, sequence: int, digest: bytes, held: _Held) -> None:
        if held.slot is None:
            if not self._unused:
                raise OutOfSlots(f"all {len(self._slots)} slots for adapters are in use (adapters.max_resident)")
            self._bring_in(self._unused.pop(0), digest, held)
        elif held.slot in self._unused:
            self._unused.remove(held.slot)
        self._users[sequence] = digest
        self._in_use[digest] = self._in_use.get(digest, 0) + 1

    def _bring_in(self, slot: int, digest: bytes, held: _Held) -> None:
        if (before := self._slots[slot]) is not None:
            self._held[before].slot = None
        self._slots[slot], held.slot = digest, slot
        source, target = self._host[held.place], self._weights.memory[slot]
        if self._copies is None:
            target.copy_(source)
            return
        self._copies.wait_stream(torch.cuda.current_stream(target.device))  # which may still read what was there
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._arriving[slot] = event = torch.cuda.Event()
            event.record()

    def _await_copies(self, slots: Int64Array) -> None:
        for slot in [slot for slot in self._arriving if slot in slots]:
            event = self._arriving[slot]
            if event.query():
                del self._arriving[slot]
            else:
                torch.cuda.current_stream(self._weights.memory.device).wait_event(event)

    def _let_go(self, digest: bytes) -> None:
        self._held[digest].users -= 1
        self._free_if_unused(digest)

    def _free_if_unused(self, digest: bytes) -> None:
        held = self._held[digest]
        if held.removed and not held.users:
            del self._held[digest]
            self._places.append(held.place)
            if held.slot is not None:
                self._slots[held.slot] = None


def adapters_of(config: WorkerConfig, model: ModelConfig, weights: AdaptedWeights | None) -> Adapters | None:
    """Makes the adapters of a rank, none held yet; None if it serves none. model: the rank's shard. Raises
    InvalidArgument if the host's bytes do not hold a single one."""
    if weights is None:
        return None
    if config.adaptive and config.adapters.max_resident == 1:
        raise InvalidArgument("adapters.max_resident is 1; it must be at least 2 where workers change their roles")
    own = config.adapters.host_bytes // config.island_ranks[config.pe]
    if own < weights.slot_bytes:
        least = weights.slot_bytes * config.island_ranks[config.pe]
        raise InvalidArgument(f"adapters.host_bytes is {config.adapters.host_bytes}; it must be at least {least}")
    return Adapters(model, weights, own)
