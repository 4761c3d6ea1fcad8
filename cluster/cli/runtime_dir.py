"""This user's running clusters: a locked file each, which the kernel unlocks however its owner ends."""

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from tandem.cluster.errors import ClusterRunning, RuntimeDirError

SUFFIX = ".cluster"
ACQUIRE_SECONDS = 0.5  # a reader's probe may hold the lock for a moment


@dataclass(frozen=True)
class ClusterState:
    """The contents of a running cluster's file."""

    name: str
    pid: int | None  # None for the instant before it is written
    started: float  # Unix time
    grpc_address: str | None = None  # HOST:PORT, once the cluster is ready
    logs: str | None = None  # folder of the processes' logs, once the cluster is ready
    start_seconds: Mapping[str, float] = field(default_factory=dict)  # of each phase, once the cluster is ready


def runtime_dir() -> Path:
    """Returns $XDG_RUNTIME_DIR/tandem, else this user's folder in the temporary folder. A missing one is made with mode
    700.

    Raises RuntimeDirError if the folder belongs to another user or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "tandem") if base else Path(tempfile.gettempdir(), f"tandem-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RuntimeDirError(f"runtime folder {folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RuntimeDirError(f"runtime folder {folder} must be a folder of uid {os.getuid()} with mode 700")
    return folder


def running_clusters() -> tuple[ClusterState, ...]:
    """Returns this user's running clusters, by name."""
    names = sorted(path.name.removesuffix(SUFFIX) for path in runtime_dir().glob(f"*{SUFFIX}"))
    return tuple(state for name in names if (state := running_cluster(name)) is not None)


def running_cluster(name: str) -> ClusterState | None:
    """Returns the running cluster of that name, or None."""
    try:
        file = os.open(_path(name), os.O_RDONLY)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):  # too long: no cluster can have it
            return None
        raise
    try:
        return None if _try_lock(file, fcntl.LOCK_SH) else _read(file, name)
    finally:
        os.close(file)


class ClusterLock:
    """A cluster's name on this machine, held until release() or until this process ends.

    Raises ClusterRunning, and RuntimeDirError where its file cannot be written.

    Programs that the process starts do not inherit the file.
    """

    def __init__(self, name: str) -> None:
        self._state = ClusterState(name, os.getpid(), time.time())
        self._path = _path(name)
        self._file: int | None = None
        self._take(ACQUIRE_SECONDS)

    def rename(self, name: str, seconds: float) -> None:
        """Gives the name up for another, which its owner has so many seconds to release. Raises as the constructor."""
        self.release()
        self._state, self._path = replace(self._state, name=name), _path(name)
        self._take(seconds)

    def publish(self, grpc_address: str, start_seconds: Mapping[str, float], logs: str | None = None) -> None:
        """Writes the gateway's HOST:PORT, the seconds of each phase of the start, and the folder of logs."""
        self._state = replace(self._state, grpc_address=grpc_address, logs=logs, start_seconds=start_seconds)
        self._write()

    def release(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take(self, seconds: float) -> None:
        try:
            self._file = self._acquire(seconds)
            self._write()
        except OSError as error:
            self.release()
            raise RuntimeDirError(
                f"{self._path} cannot be written: {error.strerror}; XDG_RUNTIME_DIR moves it"
            ) from None

    def _acquire(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if _try_lock(file, fcntl.LOCK_EX) and self._is_current(file):
                return file
            state = _read(file, self._state.name)
            os.close(file)
            if time.monotonic() > deadline:
                raise ClusterRunning(state.name, state.pid, state.grpc_address)
            time.sleep(0.02)

    def _is_current(self, file: int) -> bool:
        """Returns whether the file is still the one that was opened: its former owner may have removed it before it was
        locked."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _write(self) -> None:
        if self._file is None:
            raise RuntimeError(f"the lock of cluster {self._state.name!r} is released")
        # One write, and the text only ever grows for one owner: a reader sees the old or the new state.
        text = json.dumps(asdict(self._state)).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))


def _path(name: str) -> Path:
    return runtime_dir() / f"{name}{SUFFIX}"


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _read(file: int, name: str) -> ClusterState:
    """Returns the state in a locked file; pid is None if its owner has not written it yet."""
    try:
        return ClusterState(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return ClusterState(name, None, time.time())
