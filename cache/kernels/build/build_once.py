"""Compiles files for a user. Each is compiled once and named by the hash of all its inputs."""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
KERNEL_CACHE, TRITON_CACHE = "TANDEM_KERNEL_CACHE", "TRITON_CACHE_DIR"
SECONDS_TO_COMPILE = 120.0
LOCK_SECONDS = 2 * SECONDS_TO_COMPILE  # then another process's build no longer counts
LOCK_POLL_SECONDS = 0.05
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Returns the folder of this user's compiled files, or the folder TANDEM_KERNEL_CACHE. RuntimeError without a
    home."""
    given = os.environ.get(KERNEL_CACHE)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def share_triton_cache() -> None:
    """Lets this process, and those that it starts, keep Triton's kernels in TANDEM_KERNEL_CACHE, where it is given.

    A folder that cannot be written is left alone: Triton writes what it lacks.
    """
    folder = os.environ.get(KERNEL_CACHE)
    if folder and os.access(folder, os.W_OK):
        os.environ.setdefault(TRITON_CACHE, str(Path(folder) / "triton"))


def build_once(folder: Path, name: str, key: bytes, make: Callable[[Path], object]) -> Path:
    """The file `folder`/name, with the hash of `key` before its suffix; made by make(path) unless it is there.

    While one process makes it, others wait for the file. path: where make() writes it, in a folder that is empty at
    first and goes afterwards. What make() raises comes through, and no file is left; OSError when `folder` cannot be
    written.
    """
    built = built_path(folder, name, key)
    if not built.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = folder / f".{built.name}.lock"
        with locked(lock, LOCK_SECONDS):
            try:
                if not built.exists():
                    _make(built, make)
            finally:
                with suppress(OSError):
                    lock.unlink()  # those who wait for it look for the file first, and so do those who come later
    return built


def _make(built: Path, make: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as own:
        made = Path(own) / built.name
        make(made)
        made.replace(built)


@contextmanager
def locked(path: Path, seconds: float, wait: Callable[[], object] = lambda: None) -> Iterator[bool]:
    """Holds the lock of a file, which is made if it is not there. No two processes or threads of a host hold it at
    once.

    Yields whether it is held: False after `seconds` in which others held it. wait: called before each new attempt; what
    it raises comes through. OSError if the file is not there and cannot be made. The kernel releases the lock of a
    process that ends. On a file system without locks several may hold it.
    """
    deadline = time.monotonic() + seconds
    file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)  # another user of the folder may have made it
    try:
        while not (held := _take(file)) and time.monotonic() < deadline:
            wait()
            time.sleep(LOCK_POLL_SECONDS)
        yield held
    finally:
        os.close(file)


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        log.debug("the file system of compiled kernels has no locks", exc_info=True)
    return True


def built_path(folder: Path, name: str, key: bytes) -> Path:
    """Returns the path under which build_once() keeps a file, whether the file exists or not."""
    return (folder / name).with_stem(f"{Path(name).stem}-{short_hash(key)}")


def short_hash(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=12).hexdigest()


def built_or_none(name: str, instead: str, build: Callable[[], T]) -> T | None:
    """Returns what build() returns. If it fails as compilers do, logs what happens instead and returns None."""
    try:
        return build()
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("%s is not there, %s: %s", name, instead, reason_of(error))
        return None


def reason_of(error: Exception) -> str:
    """Returns what a failed compiler printed, or else the error's text."""
    return str(getattr(error, "stderr", None) or error).strip()


def find_compiler(*names: str) -> str:
    """Returns the first of these programs that exists; FileNotFoundError when none does."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(f"{' or '.join(names)} is not on the PATH")
    return found


def run_compiler(*command: str) -> str:
    """Returns the command's output. OSError when it cannot be run, subprocess.SubprocessError when it fails or takes
    too long."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE).stdout


def read_with_headers(source: Path, headers: Path) -> list[str]:
    """Returns the text of a C or CUDA file, and of the files in `headers` that it includes, directly or not."""
    texts: dict[Path, str] = {}
    pending = [source]
    while pending:
        path = pending.pop()
        if path not in texts:
            texts[path] = path.read_text(encoding="utf-8")
            pending += [headers / name for name in INCLUDE.findall(texts[path])]
    return list(texts.values())
