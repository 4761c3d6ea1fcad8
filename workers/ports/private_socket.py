"""Makes a gRPC server's socket that only processes of the same user and host can reach."""

import os
import shutil
import tempfile

import grpc.aio

FILE_BITS = 24


class PrivateSocket:
    """A Unix socket that lies in no folder: others cannot see it, and it leaves nothing. It is made before its
    server starts. Clients reach it through /proc, where only a process's user may open its files."""

    def __init__(self, server: grpc.aio.Server) -> None:
        folder = tempfile.mkdtemp(prefix="tandem-")
        try:
            path = os.path.join(folder, "grpc")
            server.add_insecure_port(f"unix:{path}")
            self._file: int | None = os.open(path, os.O_PATH)  # still leads there when the path is gone
        finally:
            shutil.rmtree(folder)
        self.number = os.getpid() << FILE_BITS | self._file
        self.target = private_target(self.number)
        self.path = self.target.removeprefix("unix:")

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def private_target(number: int) -> str:
    """Returns gRPC's address of the PrivateSocket of that number, which is unique on its host."""
    process, file = number >> FILE_BITS, number & (1 << FILE_BITS) - 1
    return f"unix:/proc/{process}/fd/{file}"
