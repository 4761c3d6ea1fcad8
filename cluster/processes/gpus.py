"""A worker process's GPUs: those that it sees, and its claim of the GPU that it fills.

A driver that sees a peer's GPU copies to its memory by copy engines, beside a forward. A driver that does not see it
copies by multiprocessors, and the forward waits (docs/decisions/0005).
"""

import os
import socket
import struct
from contextlib import suppress

from tandem.cluster.errors import ConfigError

MOST_GPUS = 64
VARIABLE = "CUDA_VISIBLE_DEVICES"


def with_peers(visible: str) -> str:
    """Adds all other GPUs' numbers to a value of VARIABLE that is one GPU's number. Other values are returned
    unchanged.

    CUDA ends the list at the first number that no GPU has.
    """
    if not visible.isdecimal():
        return visible
    return ",".join([visible, *(str(other) for other in range(MOST_GPUS) if other != int(visible))])


class GpuClaim:
    """A GPU's claim, held from the constructor until release() or the end of the process.

    Two processes that take all free memory of a GPU would count the same bytes, so the second gets a ConfigError.
    """

    def __init__(self, gpu: str) -> None:
        """gpu: its UUID."""
        name = f"\0tandem/gpu/{gpu}"  # an abstract address: no file is left behind
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(name)
        except OSError:
            self._socket.close()
            raise ConfigError(
                f"cache.num_pages is null, and the GPU {gpu} is filled by {_holder(name)} already, of this cluster or "
                "another: what each may have does not follow from cache.gpu_memory_utilization; give cache.num_pages, "
                "or each worker a GPU of its own"
            ) from None
        self._socket.listen()

    def release(self) -> None:
        self._socket.close()


def _holder(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(name)
        pid, _, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return "this process" if pid == os.getpid() else f"process {pid}"
    return "another process"
