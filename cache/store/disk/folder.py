"""The folder of one rank's pages, which one process has at a time."""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from tandem.cache.plan.errors import InvalidArgument

LOCK_NAME = "owner"
OWNER_SECONDS = 10.0  # in which a process that was killed lets go
POLL_SECONDS = 0.05


class PageFolder:
    """A folder that is this process's until close(), or until its end."""

    def __init__(self, path: Path, num_bytes: int, seconds: float = OWNER_SECONDS) -> None:
        """Makes the folder. num_bytes: of files that will be there. InvalidArgument where it cannot be written, where
        another process has it for longer than so many seconds, or where its disk has less room."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"cache.disk_path: {path} cannot be written ({error.strerror}); a folder that can be is accepted"
            ) from error
        try:
            self._claim(seconds)
            self._check_room(num_bytes)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= until:
                owner = os.pread(self._lock, 32, 0).decode(errors="replace")
                raise InvalidArgument(
                    f"cache.disk_path: process {owner or 'unknown'} uses {self.path}; a folder that no other cluster "
                    "uses is accepted"
                )
            time.sleep(POLL_SECONDS)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _check_room(self, num_bytes: int) -> None:
        here = sum(file.stat().st_size for file in self.path.glob("*.pages"))
        room = here + shutil.disk_usage(self.path).free
        if num_bytes > room:
            raise InvalidArgument(
                f"cache.disk_bytes takes {num_bytes} bytes in {self.path}, whose disk has room for {room}; fewer are "
                "accepted"
            )
