"""A process that has imported what actors need. Actors forked from it start in milliseconds.

    this process ──control──► server: imports, then waits ──fork──► actor
         └──────────────────────────pipe──────────────────────────────┘

The server runs no thread and touches no device, so a fork is whole. Actors share its memory until they write to it. The
server ends with this process, and the actors end with the server.
"""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from threading import Lock
from typing import NoReturn

from tandem.cluster.errors import StartFailed
from tandem.cluster.processes.actor_server import serve, set_title
from tandem.cluster.processes.forked_actor import STATUS_BYTES, ForkedActor

PID_BYTES = 8
NAME_BYTES = 255
PR_SET_PDEATHSIG = 1
CUDA_ERROR_NOT_INITIALIZED = 3


class ForkServer:
    """This process's end of a server. fork() is safe from any thread."""

    def __init__(self, modules: Sequence[str], title: str = "") -> None:
        """Returns at once. modules: what the server imports; of `module:name` it also calls the function `name`.
        title: what `ps` shows of it, behind `tandem: `.

        Failed imports are skipped: the actor that needs one reports it. If an import touches a GPU, all are skipped.
        """
        self._lock = Lock()
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            _command(theirs.fileno(), modules, title),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self.pid = self._process.pid

    def fork(self, name: str, start: bytes, seconds: float) -> ForkedActor:
        """A new actor, whose constructor now runs. start: pack((kind, argument)).

        StartFailed when the server is gone or still imports after `seconds`.
        """
        pipe, theirs = Pipe()
        with self._lock, theirs:
            self._control.settimeout(seconds)
            try:
                socket.send_fds(self._control, [name.encode()[-NAME_BYTES:]], [theirs.fileno()])
                pid, fds, *_ = socket.recv_fds(self._control, PID_BYTES, 2)
            except OSError:
                pid, fds = b"", []
                self._process.kill()  # an answer that came later would be taken for that to the next order
        if not pid:
            pipe.close()
            raise StartFailed(f"{name} cannot be started: no answer within {seconds:g} s from what would fork it")
        pidfd, status = fds
        return ForkedActor(name, int.from_bytes(pid, "little"), pidfd, status, pipe, start)

    def close(self) -> None:
        """Ends the server and its actors; idempotent."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def run(control: int, modules: Sequence[str], title: str) -> NoReturn:
    """The server. It ends when the other end of the socket `control` is closed."""
    if title:
        set_title(title)
    gc.disable()  # all that is imported stays
    for entry in modules:
        module, _, function = entry.partition(":")
        with suppress(Exception):
            imported = import_module(module)
            if function:
                getattr(imported, function)()
    if _has_touched_gpu():
        os.set_inheritable(control, True)
        os.execv(sys.executable, _command(control, (), title))
    gc.collect()
    gc.enable()
    gc.freeze()  # a collection in an actor would write to, and so copy, what is shared
    ends: dict[int, int] = {}  # where to write, by pid, how an actor ended
    signal.signal(signal.SIGCHLD, lambda *_: _reap(ends))
    with socket.socket(fileno=control) as asked:
        while True:
            name, fds, *_ = socket.recv_fds(asked, NAME_BYTES, 1)
            if not name:
                os._exit(0)
            _fork(asked, name.decode(errors="replace"), fds[0], ends)


def _command(control: int, modules: Sequence[str], title: str) -> list[str]:
    program = f"from tandem.cluster.processes.fork_server import run; run({control}, {list(modules)!r}, {title!r})"
    return [sys.executable, "-c", program]


def _has_touched_gpu() -> bool:
    """Whether this process has initialised CUDA, which does not survive a fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # it is not even loaded
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED


def _fork(asked: socket.socket, name: str, pipe: int, ends: dict[int, int]) -> None:
    server = os.getpid()
    status, end = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # a process must not be reaped before it has a pidfd
    pid = os.fork()
    if pid == 0:
        asked.close()
        for other in (status, end, *ends.values()):
            os.close(other)
        _work(server, name, pipe)
    os.close(pipe)
    ends[pid] = end
    handle = os.pidfd_open(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    with suppress(OSError):  # whoever asked is gone: that is seen next
        socket.send_fds(asked, [pid.to_bytes(PID_BYTES, "little")], [handle, status])
    os.close(handle)
    os.close(status)


def _work(server: int, name: str, pipe: int) -> NoReturn:
    """The actor's process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        set_title(name)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it ended before that was set
            serve(Connection(pipe))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _reap(ends: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            end = ends.pop(pid)
            with suppress(BrokenPipeError):  # nobody wants to know
                os.write(end, status.to_bytes(STATUS_BYTES, "little"))
            os.close(end)
