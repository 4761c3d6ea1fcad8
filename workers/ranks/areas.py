"""Memory where the ranks of a worker on GPUs meet, if their transport maps none: CUDA's handles go through the memory
that they share on the host.

    rank 0                                rank 1
    allocates and zeroes its area         allocates and zeroes its area
    HANDLE, then READY   ───────────────► opens it
    opens it             ◄─────────────── HANDLE, then READY

An area is its process's until that ends. So no rank frees what another one may still store to.
"""

import ctypes
import time
from contextlib import suppress

from tandem.workers.errors import NoRanks, RankLost
from tandem.workers.kernels.cuda.driver import LIBRARY, Driver
from tandem.workers.ranks.rank_memory import HANDLE_WORDS, LOST, READY, RankMemory, keep_order

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
POLL_SECONDS = 0.002


class Handle(ctypes.Structure):
    """CUipcMemHandle; the driver takes it by value."""

    _fields_ = (("words", ctypes.c_uint64 * HANDLE_WORDS),)


class Areas:
    """Of one rank, on the current device, whose context exists. open() → close(), again and again."""

    def __init__(self, library: str = LIBRARY) -> None:
        """library: CUDA's driver."""
        self._driver = Driver(library)
        self._own: tuple[int, int] | None = None  # address and bytes
        self._opened: list[int] = []

    def open(self, memory: RankMemory, rank: int, num_bytes: int, seconds: float) -> list[int]:
        """Where this process has each rank's area of so many bytes, zeroed. All ranks call it, with memory that none of
        them has used for it before. RankLost where one does not come within that time; NoRanks where its area cannot be
        mapped."""
        self._offer(memory, rank, num_bytes)
        areas: list[int] = []
        for other, state in enumerate(memory.states):
            if other == rank:
                areas.append(self._address)
                continue
            deadline = time.monotonic() + seconds
            while not state.get(READY):
                if state.get(LOST) or time.monotonic() > deadline:
                    raise RankLost(f"rank {other} has offered no memory to meet in for {seconds:g} s, or is lost")
                time.sleep(POLL_SECONDS)
            keep_order()
            areas.append(self._map(other, Handle.from_buffer_copy(state.handle.tobytes())))
        return areas

    def close(self) -> None:
        """Unmaps the areas of others, which nothing uses here any more. Idempotent."""
        for address in self._opened:
            with suppress(RuntimeError):  # the device has failed: its process ends soon
                self._driver.check("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._opened.clear()

    @property
    def _address(self) -> int:
        assert self._own is not None, "open() comes first"
        return self._own[0]

    def _offer(self, memory: RankMemory, rank: int, num_bytes: int) -> None:
        check, address, handle = self._driver.check, ctypes.c_uint64(), Handle()
        if self._own is None or self._own[1] < num_bytes:
            check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self._own = address.value, num_bytes
        check("cuMemsetD8_v2", ctypes.c_uint64(self._address), ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        check("cuCtxSynchronize")
        check("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._address))
        state = memory.states[rank]
        state.handle[:] = handle.words[:]
        keep_order()
        state.set(READY, 1)

    def _map(self, rank: int, handle: Handle) -> int:
        address = ctypes.c_uint64()
        try:
            self._driver.check("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        except RuntimeError as error:
            raise NoRanks(
                f"the memory of rank {rank} cannot be mapped here ({error}); the ranks of a worker need GPUs that are "
                "peer to peer"
            ) from error
        self._opened.append(address.value)
        return address.value
