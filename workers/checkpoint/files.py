"""Opening of a checkpoint's files, which may be anybody's: regular files of bounded sizes, or an error."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from tandem.workers.checkpoint.errors import CheckpointMissing, NotFetched

MAX_NAME = 255  # bytes of a file's name, as Linux has it
POINTER = b"version https://git-lfs"  # the first bytes of a Git LFS pointer
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def is_there(path: Path) -> bool:
    """Whether the folder has a file of that name, or a link that leads nowhere. Opening such a link fails."""
    return os.path.lexists(path)


def is_file_name(name: str) -> bool:
    """Whether a folder can have a file of that name: a bare one, without a path."""
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may hold
        return False
    return 1 <= size <= MAX_NAME and name not in (".", "..") and not {"/", "\0"} & set(name)


def open_regular(path: Path) -> BinaryIO:
    """The file, unbuffered. Never waits for a writer.

    Raises FileNotFoundError, and CheckpointMissing when it cannot be opened or is no regular file; a link may lead to
    one.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)  # first: opening some devices does something
        if kind == stat.S_IFREG:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            kind = stat.S_IFMT(os.fstat(file).st_mode)
            if kind == stat.S_IFREG:
                return os.fdopen(file, "rb", buffering=0)
            os.close(file)
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointMissing(f"{path} is a link to nowhere; it must lead to a regular file") from None
        raise
    except (OSError, ValueError) as error:
        raise CheckpointMissing(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    raise CheckpointMissing(f"{path} is {KINDS.get(kind, 'no file')}; it must be a regular file")


def read_text(path: Path, limit: int) -> str:
    """The UTF-8 text of a file of at most `limit` bytes. Raises as open_regular(), CheckpointMissing when it is longer,
    and UnicodeDecodeError."""
    with open_regular(path) as file:
        check_size(path, file, limit)
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise CheckpointMissing(f"{path} cannot be read: {error.strerror}") from None
    check_fetched(path, content)
    return content[:limit].decode("utf-8")


def check_fetched(path: Path, first: bytes) -> None:
    """Raises NotFetched when a file begins like a Git LFS pointer."""
    if first.startswith(POINTER):
        raise NotFetched(f"{path} is a Git LFS pointer, not the file; `git lfs pull` in {path.parent} fetches it")


def check_size(path: Path, file: BinaryIO, limit: int) -> None:
    """CheckpointMissing when an open file has more than `limit` bytes."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise CheckpointMissing(f"{path} has {size} bytes; it may have at most {limit}")
