"""Which process fills a GPU: at most one of this machine, of whichever island or cluster."""

import os
import socket
import struct
from contextlib import suppress

from tandem.cluster.errors import ConfigError


class GpuClaim:
    """Held from the constructor until release(), or until the process ends, however it does.

    Who takes pages by what is free on a GPU counts what another, who does the same, has yet to take.
    Raises ConfigError when another has claimed it.
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
