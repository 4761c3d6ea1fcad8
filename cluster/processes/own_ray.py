"""A Ray that this process starts and ends, on loopback only."""

import logging
import math
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.utils

from tandem.cluster.errors import StartFailed
from tandem.cluster.processes.process_tree import Process, descendants, kill, runs

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through Ray's object store
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": the node's address is 127.0.0.1, as on those systems
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 lets any other process of the machine go first
    # Without a GCS Ray's processes end themselves after a minute. They can run without it, and it may come back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600),
    "RAY_task_events_report_interval_ms": "0",  # the GCS keeps an event of every call: 2.4 MiB a minute, nearly idle
    "RAY_prestart_worker_first_driver": "0",  # Python processes, one for each core, that no actor of ours can use
}
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SECONDS = 5.0  # from a signal until a start that cannot end is left
LOOK_SECONDS = 0.5
GCS = "gcs_server"  # Ray's, by the name of its process
GIB = 1 << 30
log = logging.getLogger(__name__)


def prefer_settings() -> None:
    """Sets environment variables that Ray and its processes read, unless the user has set them."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def use_loopback(only: bool) -> None:
    """only: Ray's servers in this process, and in those that it starts, listen on 127.0.0.1; else on all addresses."""
    os.environ[LOOPBACK] = str(int(not only))
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = not only  # read from there when Ray was imported


@contextmanager
def deferred_signals(*, joins: bool = False) -> Iterator[list[int]]:
    """Defers signals while a Ray is started or joined. They are delivered afterwards, to the earlier handlers; the list
    has the signals that have come. This matters in the main thread only: others get no signals.

    A handler that raises could do so between a fork and Python's release of the lock of `logging`. Then nobody can take
    the lock again, and the process hangs. Ray's own handler of SIGTERM raises, so it is not set.

    A signal to the whole process group ends Ray's processes, too. Ray's C++ code would then wait for its GCS for 60 s,
    and end this process with lines of its own. leave_without_gcs() ends the process earlier. joins: a Ray that others
    have started is joined, whose GCS is none of this process's: the start always goes on to its end.
    """
    came: list[int] = []
    if current_thread() is not main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    utils: Any = ray._private.utils
    set_handler = utils.set_sigterm_handler
    before = {number: signal.signal(number, note) for number in SIGNALS}
    utils.set_sigterm_handler = lambda handler: None
    fatal = {number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)}
    try:
        with nullcontext() if joins else _gcs_is_watched(fatal):
            yield came
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: Python did not set it
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def _gcs_is_watched(fatal: Set[int]) -> Iterator[None]:
    """Runs leave_without_gcs() in a thread within the block. fatal: see there."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(read, True)
    woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=leave_without_gcs, args=(read, fatal), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        os.close(write)  # which ends the thread


def leave_without_gcs(signals: int, fatal: Set[int]) -> None:
    """Ends this process and all that it has started, once a stop signal has come and Ray's GCS is gone. Returns when
    the other end of `signals`, the descriptor of a pipe, is closed; it has the numbers of signals, one a byte. Python's
    own handlers do not run while the main thread waits in Ray's C++ code. fatal: signals for which the program has no
    handler. After one the status is a shell's for it, or a script that starts a cluster would seem to succeed."""
    poll, number, deadline = select.poll(), 0, math.inf
    poll.register(signals, select.POLLIN)
    while True:
        if poll.poll(1e3 * LOOK_SECONDS):
            new = os.read(signals, 1)
            if not new:
                os.close(signals)
                return
            if not number and new[0] in SIGNALS:
                number, deadline = new[0], time.monotonic() + STOP_SECONDS
        if time.monotonic() > deadline and not has_gcs(started := descendants(os.getpid())):
            os.write(2, f"tandem: {signal.Signals(number).name}: stopping, while Ray started\n".encode())
            kill(started)
            os._exit(128 + number if number in fatal else 0)


def has_gcs(processes: Iterable[Process]) -> bool:
    """Whether a GCS of Ray is among them and runs."""
    for process in processes:
        with suppress(OSError):
            if Path(f"/proc/{process[0]}/comm").read_text(encoding="utf-8").strip() == GCS and runs(process):
                return True
    return False


class OwnRay:
    """A Ray of one node, started by the constructor. StartFailed after ATTEMPTS."""

    def __init__(self, num_cpus: int | None, options: dict[str, Any], signals: Sequence[int] = ()) -> None:
        """options: more options of ray.init. signals: signals that have come; after one there is no further attempt."""
        self._processes: set[Process] = set()
        use_loopback(True)
        options = options | {
            "address": "local",  # else Ray joins one that it finds
            "num_cpus": num_cpus or os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._start(options)
                return
            except (TypeError, ValueError) as error:
                raise StartFailed(f"a local Ray cannot be started: {error}") from error
            except Exception as error:  # Ray raises bare exceptions if its own processes start too slowly
                reason = f"{(str(error) or type(error).__name__).splitlines()[0]}; {machine_load()}"
                if attempt == ATTEMPTS or signals:
                    raise StartFailed(f"a local Ray cannot be started, in {attempt} attempts: {reason}") from error
                log.warning("Ray did not start, attempt %d of %d: %s", attempt, ATTEMPTS, reason)
                time.sleep(PAUSE_SECONDS)

    def end(self) -> None:
        """Leaves no process of Ray's. Idempotent."""
        try:
            ray.shutdown()
        finally:
            kill(self._processes)  # without a GCS Ray's agents would wait for it for a minute
            self._processes = set()

    def _start(self, options: dict[str, Any]) -> None:
        before = descendants(os.getpid())
        try:
            ray.init(**options)
        except BaseException:
            self._processes = descendants(os.getpid()) - before
            self.end()
            raise
        self._processes = descendants(os.getpid()) - before


def machine_load() -> str:
    """Describes how busy this machine is: the likely cause of a slow or failed start."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    folder = tempfile.gettempdir()
    return (
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {free / GIB:.1f} GiB of memory and "
        f"{shutil.disk_usage(folder).free / GIB:.1f} GiB of {folder} are free"
    )
