"""Where a gRPC server hears only from processes of the same user and host."""

import os
import shutil
import tempfile

import grpc.aio


class PrivateSocket:
    """A Unix socket that lies in no folder: others cannot see it, and nothing is left of it. Made before its server
    starts. It leads there through /proc, whose files of a process only its user opens."""

    def __init__(self, server: grpc.aio.Server) -> None:
        folder = tempfile.mkdtemp(prefix="tandem-")
        try:
            path = os.path.join(folder, "grpc")
            server.add_insecure_port(f"unix:{path}")
            self.number = os.open(path, os.O_PATH)  # still leads there when the path is gone
        finally:
            shutil.rmtree(folder)
        self.target = private_target(os.getpid(), self.number)
        self.path = self.target.removeprefix("unix:")

    def close(self) -> None:
        os.close(self.number)


def private_target(pid: int, number: int) -> str:
    """What gRPC calls the PrivateSocket of that number in a process."""
    return f"unix:/proc/{pid}/fd/{number}"
