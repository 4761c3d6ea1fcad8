"""A file that is replaced as a whole, so that readers see either the old file or the new one."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.cluster.errors import TandemError, UsageError
from tandem.cluster.keys.key_file import MAX_BYTES

LOCK_SECONDS = 10.0
POLL_SECONDS = 0.05
OWN_MODE = 0o600  # of a new file
OTHERS_WRITE = 0o022


def replace_file(path: Path, change: Callable[[str], str], *, makes: bool) -> None:
    """Gives a file the text that `change` makes of its text. One such call at a time changes files of a folder.

    The file keeps its owner and its mode, without the right of others to write. A new one has mode 600. A link stays,
    and the file that it names is replaced. makes: whether a missing file is as one without text.
    Raises UsageError where there is none, TandemError where it cannot be read or written, and what `change` raises.
    """
    try:
        target = path.expanduser().resolve()
        with _alone(target.parent):
            before = _stat(target, makes=makes)
            text = "" if before is None else target.read_text(encoding="utf-8")
            _write(target, change(text), before)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 at byte {error.start}") from None
    except (OSError, RuntimeError) as error:  # the latter is a loop of links, before Python 3.13
        raise TandemError(f"{path} cannot be changed: {getattr(error, 'strerror', None) or error}") from None


def _stat(path: Path, *, makes: bool) -> os.stat_result | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        if makes:
            return None
        raise UsageError(f"{path} is missing") from None
    if not path.is_file():
        raise UsageError(f"{path} is not a regular file")
    if found.st_size > MAX_BYTES:
        raise UsageError(f"{path} has {found.st_size} bytes; it may have at most {MAX_BYTES}")
    return found


def _write(path: Path, text: str, before: os.stat_result | None) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if before is not None:
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)  # a gateway of that user reads it
                os.fchmod(file.fileno(), before.st_mode & 0o777 & ~OTHERS_WRITE)
            else:
                os.fchmod(file.fileno(), OWN_MODE)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks the folder, for the file itself is replaced. A rename is on the disk when the block has ended."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TandemError(f"{folder}: another command changes files there for {LOCK_SECONDS:g} s") from None
                time.sleep(POLL_SECONDS)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
