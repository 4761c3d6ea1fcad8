"""What other processes hold of a worker's GPU."""

import threading
import time
from collections.abc import Callable

from tandem.cache.kernels.build.nvml import bytes_of_others

READ_SECONDS = 5.0  # between two looks


class GpuMemory:
    """Reads a GPU's memory in a thread of its own, because a driver may be stuck. Owned by the step thread.

    uuid: of the GPU; None on a CPU, which has no such number. read: asks the driver.
    """

    def __init__(self, uuid: str | None, read: Callable[[str], int | None] = bytes_of_others) -> None:
        self._uuid, self._read = uuid, read
        self._found: int | None = None
        self._began = -READ_SECONDS
        self._reading: threading.Thread | None = None

    def bytes_of_others(self) -> int | None:
        """What the last look found, at once. None before the first one has ended, and where the driver does not tell.

        Each call begins another look when the last one is READ_SECONDS old. One that never ends stays the last one.
        """
        now = time.monotonic()
        idle = self._reading is None or not self._reading.is_alive()
        if self._uuid is not None and idle and now - self._began >= READ_SECONDS:
            self._began = now
            self._reading = threading.Thread(target=self._look, args=(self._uuid,), name="gpu-memory", daemon=True)
            self._reading.start()
        return self._found

    def _look(self, uuid: str) -> None:
        self._found = self._read(uuid)
