"""The memory that the ranks of one worker share: sums, the leader's calls, and the ranks' states.

    0      random token; a handle with another token belongs to another process and is refused
    4096   sums                see sums.c
    …      states              int64 [ranks, STATE + workers + rows]: see RankState
    …      written             int64: bytes of calls that the leader has written in all
    …      calls               a ring of bytes; an int64 before each call has its length

It is an anonymous file of the leader, so nothing is left behind, however the processes end.
"""

import json
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.errors import RankLost
from tandem.workers.ranks.shared_ranks import sums_bytes, why_failed

NAME = "tandem-ranks"
TOKEN_BYTES, ALIGNMENT, LENGTH_BYTES = 16, 4096, 8
RING_BYTES = 16 << 20  # of the ring, in addition to the longest prompt
BYTES_A_TOKEN = 16  # of that prompt
HANDLE, HANDLE_WORDS = 8, 8
STATE = HANDLE + HANDLE_WORDS
DONE, MARK, LOST, READ, PID, READY, ADAPTER, DIGEST = range(8)


class RankState:
    """One rank's state. Only that rank writes it."""

    def __init__(self, words: Int64Array, num_workers: int) -> None:
        self._words = words
        self.handle = words[HANDLE:STATE]  # CUDA's handle, by which other ranks map this rank's area
        self.fences = words[STATE : STATE + num_workers]  # for each worker, the last fence that has passed
        self.signals = words[STATE + num_workers :]  # signals of its mailbox rows

    def get(self, field: int) -> int:
        """DONE: calls that a follower has finished, or that the leader has written. MARK: the last mark that has
        passed. LOST: not 0 once the rank cannot continue. READ: bytes of calls that it has read. PID: its process.
        READY: not 0 once `handle` is set. ADAPTER: the number of an adapter that it has read. DIGEST: digest_word() of
        that adapter."""
        return int(self._words[field])

    def set(self, field: int, value: int) -> None:
        self._words[field] = value


class RankMemory:
    """One rank's mapping of the memory. It is unmapped with the last reference."""

    def __init__(self, memory: mmap.mmap, size: int, num_workers: int, num_rows: int, ring_bytes: int) -> None:
        at = ALIGNMENT
        self._memory = memory
        self.token = memory[:TOKEN_BYTES]
        self.sums: Int64Array = np.frombuffer(memory, np.int64, sums_bytes(size) // 8, offset=at)
        at += _aligned(sums_bytes(size))
        width = STATE + num_workers + num_rows
        states = np.frombuffer(memory, np.int64, size * width, offset=at).reshape(size, width)
        self.states: list[RankState] = [RankState(states[rank], num_workers) for rank in range(size)]
        at += _aligned(8 * size * width)
        self.written: Int64Array = np.frombuffer(memory, np.int64, 1, offset=at)
        self.ring = np.frombuffer(memory, np.uint8, ring_bytes, offset=at + ALIGNMENT)

    def why_failed(self, rank: int) -> str:
        """See shared_ranks.why_failed."""
        return why_failed(self.sums, rank)

    @staticmethod
    def num_bytes(size: int, num_workers: int, num_rows: int, ring_bytes: int) -> int:
        states = 8 * size * (STATE + num_workers + num_rows)
        return 2 * ALIGNMENT + _aligned(sums_bytes(size)) + _aligned(states) + ring_bytes


def digest_word(digest: bytes) -> int:
    """The first 8 bytes of a digest as a word of a state; 0 for an empty one."""
    return int.from_bytes(digest[:8], "little", signed=True)


def ring_bytes(max_model_len: int) -> int:
    return _aligned(RING_BYTES + BYTES_A_TOKEN * max_model_len)


def create_memory(size: int, num_workers: int, num_rows: int, ring: int) -> tuple[RankMemory, int, bytes]:
    """Makes the memory, zeroed, in the leader. Returns it, its file descriptor, which the caller closes, and the handle
    that followers attach by."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        num_bytes = RankMemory.num_bytes(size, num_workers, num_rows, ring)
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
    except OSError:
        os.close(fd)
        raise
    memory[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
    made = RankMemory(memory, size, num_workers, num_rows, ring)
    return made, fd, json.dumps({"pid": os.getpid(), "fd": fd, "token": made.token.hex()}).encode()


def attach_memory(handle: bytes, size: int, num_workers: int, num_rows: int, ring: int) -> RankMemory:
    """Maps the leader's memory in a follower. RankLost if the leader has ended."""
    try:
        detail: dict[str, Any] = json.loads(handle)
        path = f"/proc/{int(detail['pid'])}/fd/{int(detail['fd'])}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise RankLost(f"the leader has ended, and its pid {detail['pid']} belongs to another process")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, RankMemory.num_bytes(size, num_workers, num_rows, ring))
        finally:
            os.close(fd)
    except (OSError, ValueError, KeyError) as error:
        raise RankLost(f"the leader's memory cannot be mapped: {error}") from error
    made = RankMemory(memory, size, num_workers, num_rows, ring)
    if made.token.hex() != detail["token"]:
        raise RankLost(f"the leader has ended, and its pid {detail['pid']} belongs to another process")
    return made


class CallWriter:
    """The leader's end of the ring. Owned by its step thread."""

    def __init__(self, memory: RankMemory, seconds: float) -> None:
        """seconds: longest wait for a follower to read."""
        self._written, self._ring, self._followers = memory.written, memory.ring, memory.states[1:]
        self._seconds = seconds
        self._at = 0

    def write(self, call: bytes) -> None:
        """Raises RankLost if a follower does not make room in time, or cannot continue."""
        needed = LENGTH_BYTES + len(call)
        if needed > self._ring.size:
            raise RankLost(f"a call has {needed} bytes; the ranks' memory takes {self._ring.size}")
        wait_until(lambda: self._room() >= needed, self._seconds, "the followers do not read their calls")
        for part in (len(call).to_bytes(LENGTH_BYTES, "little"), call):
            _put(self._ring, self._at, part)
            self._at += len(part)
        keep_order()
        self._written[0] = self._at

    def _room(self) -> int:
        for rank, state in enumerate(self._followers, 1):
            if state.get(LOST):
                raise RankLost(f"rank {rank} cannot continue; its log has the reason")
        return self._ring.size - self._at + min(state.get(READ) for state in self._followers)


class CallReader:
    """A follower's end of the ring. Owned by its step thread."""

    def __init__(self, memory: RankMemory, rank: int) -> None:
        self._written, self._ring, self._state = memory.written, memory.ring, memory.states[rank]
        self._at = 0

    def read(self) -> bytes | None:
        """Returns the next call; None if there is none yet."""
        if int(self._written[0]) == self._at:
            return None
        keep_order()
        length = int.from_bytes(_get(self._ring, self._at, LENGTH_BYTES), "little")
        call = _get(self._ring, self._at + LENGTH_BYTES, length)
        self._at += LENGTH_BYTES + length
        keep_order()  # before the leader may overwrite it
        self._state.set(READ, self._at)
        return call


def wait_until(is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Polls until is_so(). RankLost with the text `otherwise` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise RankLost(f"{otherwise}, for {seconds:g} s")
        time.sleep(0)


_order = threading.Lock()


def keep_order() -> None:
    """A memory fence, for other processes, too: see SharedMemoryTransport."""
    with _order:
        pass
    with _order:
        pass


def _put(ring: np.ndarray[Any, np.dtype[np.uint8]], at: int, data: bytes) -> None:
    begin, source = at % ring.size, np.frombuffer(data, np.uint8)
    first = min(len(data), ring.size - begin)
    ring[begin : begin + first] = source[:first]
    ring[: len(data) - first] = source[first:]


def _get(ring: np.ndarray[Any, np.dtype[np.uint8]], at: int, count: int) -> bytes:
    begin = at % ring.size
    first = min(count, ring.size - begin)
    return ring[begin : begin + first].tobytes() + ring[: count - first].tobytes()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
