"""A pipe by which processes of this host notice the end of the one that holds it, however it ended."""

import os
from contextlib import suppress


class Lifeline:
    """Held by one process until cut(), or until that process ends. Others wait for it by its path."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()  # programs that this process starts do not inherit them
        self.path = f"/proc/{os.getpid()}/fd/{self._read}"

    def cut(self) -> None:
        """Tells all processes that wait. Idempotent. The path stays open, so that processes that come late notice it,
        too."""
        fd, self._write = self._write, -1
        if fd >= 0:
            os.close(fd)


def wait_until_cut(path: str) -> None:
    """Returns once the lifeline at `path` is cut or its holder has ended. For processes of the holder's user."""
    with suppress(OSError):
        if not os.readlink(path).startswith("pipe:"):  # after a reuse of the pid it may be any file
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.read(fd, 1)  # nobody writes
        finally:
            os.close(fd)
