"""GPU memory for the collectives of a worker's ranks, if their transport maps none. The ranks exchange CUDA's handles
through host memory that they share.

    rank 0                                rank 1
    allocates and zeroes its area         allocates and zeroes its area
    HANDLE, then READY   ───────────────► opens it
    opens it             ◄─────────────── HANDLE, then READY

A process keeps its area until it ends. So no rank frees memory that another one may still write.
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
    """One rank's areas on the current device, which has a context. open() → close(), any number of times."""

    def __init__(self, library: str = LIBRARY) -> None:
        """library: CUDA's driver."""
        self._driver = Driver(library)
        self._own: tuple[int, int] | None = None  # address and bytes
        self._opened: list[int] = []

    def open(self, memory: RankMemory, rank: int, num_bytes: int, seconds: float) -> list[int]:
        """Returns the addresses at which this process maps each rank's zeroed area of num_bytes. All ranks call it,
        with memory that was not used for this before. RankLost if a rank offers no area within `seconds`; NoRanks if an
        area cannot be mapped."""
        self._offer(memory, rank, num_bytes)
        areas: list[int] = []
        for other, state in enumerate(memory.states):
            if other == rank:
                areas.append(self._address)
                continue
            deadline = time.monotonic() + seconds
            while not state.get(READY):
                if state.get(LOST) or time.monotonic() > deadline:
                    raise RankLost(f"rank {other} offered no memory for collectives within {seconds:g} s, or is lost")
                time.sleep(POLL_SECONDS)
            keep_order()
            areas.append(self._map(other, Handle.from_buffer_copy(state.handle.tobytes())))
        return areas

    def close(self) -> None:
        """Unmaps the other ranks' areas, which must no longer be in use here. Idempotent."""
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
