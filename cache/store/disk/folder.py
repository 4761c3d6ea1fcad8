"""The folder of one rank's pages, which one process has at a time."""

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from tandem.cache.plan.errors import InvalidArgument

LOCK_NAME = "owner"
OWNER_SECONDS = 10.0  # in which a process that was killed lets go
POLL_SECONDS = 0.05
FOLDER_NAME = re.compile(r"worker\d+-rank\d+")
MOST_REMOVED = 64  # folders at once
log = logging.getLogger(__name__)


def folder_name(worker: int, rank: int) -> str:
    """Returns the name of a rank's folder in its island's folder."""
    return f"worker{worker}-rank{rank}"


class PageFolder:
    """A folder that is this process's until close(), or until its end."""

    def __init__(self, path: Path, num_bytes: int, seconds: float = OWNER_SECONDS) -> None:
        """Makes the folder. num_bytes: of files that will be there. Raises InvalidArgument if it cannot be written, if
        another process has it for longer than so many seconds, or where its disk has less room."""
        self.path, self._lock = path, -1
        try:
            self._claim(seconds)
            self._check_room(num_bytes)
        except OSError as error:
            self.close()
            raise InvalidArgument(
                f"cache.disk_path: {path} cannot be written ({error.strerror}); give a folder that can be"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (lock := _lock(self.path)) is None:
            if time.monotonic() >= until:
                owner = (self.path / LOCK_NAME).read_bytes()[:32].decode(errors="replace")
                raise InvalidArgument(
                    f"cache.disk_path: process {owner or 'unknown'} uses {self.path}; give a folder that no other "
                    "cluster uses"
                )
            time.sleep(POLL_SECONDS)
        self._lock = lock
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _check_room(self, num_bytes: int) -> None:
        here = sum(file.stat().st_size for file in self.path.glob("*.pages"))
        room = here + shutil.disk_usage(self.path).free
        if num_bytes > room:
            raise InvalidArgument(
                f"cache.disk_bytes takes {num_bytes} bytes in {self.path}, whose disk has room for {room}; set fewer"
            )


def remove_left(folder: Path, known: Container[str]) -> None:
    """Removes folders beside `folder` that workers of earlier, larger islands have left: those with a name of the same
    form that is not known, and that no process has. At most MOST_REMOVED at once; errors are logged."""
    try:
        beside = [path for path in folder.parent.iterdir() if FOLDER_NAME.fullmatch(path.name)]
    except OSError as error:
        log.warning("cache.disk_path: %s cannot be listed: %s", folder.parent, error)
        return
    left = [path for path in sorted(beside) if path.name not in known and path != folder and not path.is_symlink()]
    for path in left[:MOST_REMOVED]:
        try:
            if (path / LOCK_NAME).is_file():
                _remove(path)
        except OSError as error:
            log.warning("cache.disk_path: %s, which a removed worker has left, stays: %s", path, error)


def _remove(folder: Path) -> None:
    """Unless a process has the folder. One that waits for it finds that the lock's file is gone, and makes it again."""
    lock = _lock(folder)
    if lock is None:
        return
    try:
        for file in folder.glob("*.pages"):
            file.unlink()
        (folder / LOCK_NAME).unlink()
        with suppress(OSError):  # it has other files, or is another worker's by now
            folder.rmdir()
        log.info("cache.disk_path: removed the pages in %s, which a removed worker had left", folder)
    finally:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """The descriptor of a folder's lock, which this process has until it is closed; None while another one has it.
    Makes the folder. OSErrors."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(folder / LOCK_NAME, flags, 0o600)
    except FileNotFoundError:  # the folder was removed a moment ago
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == os.stat(folder / LOCK_NAME).st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None
