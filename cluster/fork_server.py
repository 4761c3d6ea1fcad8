"""A process that has imported what actors need and does nothing else: actors forked from it start in milliseconds.

    this process ──control──► server: imports, then waits ──fork──► actor
         └──────────────────────────pipe──────────────────────────────┘

The server runs no thread and touches no device, so that what it has is whole after a fork; its memory is shared with
its actors until one writes to it. It ends with this process, and its actors with it, however that happens.
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

from tandem.cluster.actor_server import serve
from tandem.cluster.errors import StartFailed
from tandem.cluster.forked_actor import ForkedActor

PID_BYTES = 8
TITLE_BYTES = 15  # as long as Linux keeps
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CUDA_ERROR_NOT_INITIALIZED = 3


class ForkServer:
    """This process's end of one server. fork() may come from any thread."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Returns at once. modules: to be imported, as this process finds them; with `:name`, that is then called. What
        cannot be imported is for the actor to complain about that needs it; if one touches a GPU, the server does
        without all of them."""
        self._lock = Lock()
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            _command(theirs.fileno(), modules),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self.pid = self._process.pid

    def fork(self, name: str, start: bytes, seconds: float) -> ForkedActor:
        """The actor of that name, whose constructor runs from now on; start: pack((kind, argument)).

        StartFailed when the server is gone, or has not come through its imports within `seconds`.
        """
        pipe, theirs = Pipe()
        with self._lock, theirs:
            self._control.settimeout(seconds)
            try:
                socket.send_fds(self._control, [_title(name)], [theirs.fileno()])
                pid, fds, *_ = socket.recv_fds(self._control, PID_BYTES, 1)
            except OSError:
                pid, fds = b"", []
                self._process.kill()  # an answer that came later would be taken for that to the next order
        if not pid:
            pipe.close()
            raise StartFailed(f"{name} cannot be started: no answer within {seconds:g} s from what would fork it")
        return ForkedActor(name, int.from_bytes(pid, "little"), fds[0], pipe, start)

    def close(self) -> None:
        """Ends the server and with it all its actors; idempotent."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def run(control: int, modules: Sequence[str]) -> NoReturn:
    """The server. Ends when the other end of the socket `control` is closed."""
    for entry in modules:
        module, _, function = entry.partition(":")
        with suppress(Exception):
            imported = import_module(module)
            if function:
                getattr(imported, function)()
    if _has_touched_gpu():
        os.set_inheritable(control, True)
        os.execv(sys.executable, _command(control, ()))
    gc.collect()
    gc.freeze()  # a collection in an actor would write to, and so copy, what is shared
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.socket(fileno=control) as asked:
        while True:
            title, fds, *_ = socket.recv_fds(asked, TITLE_BYTES, 1)
            if not title:
                os._exit(0)
            _fork(asked, title, fds[0])


def _command(control: int, modules: Sequence[str]) -> list[str]:
    program = f"from tandem.cluster.fork_server import run; run({control}, {list(modules)!r})"
    return [sys.executable, "-c", program]


def _has_touched_gpu() -> bool:
    """Whether this process has initialised CUDA, which does not survive a fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # it is not even loaded
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED


def _title(name: str) -> bytes:
    """What `ps -e` and `top` show of an actor: the last part of its name."""
    return name.rpartition("/")[2].encode()[:TITLE_BYTES] or b"?"


def _fork(asked: socket.socket, title: bytes, pipe: int) -> None:
    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # a process must not be reaped before it has a pidfd
    pid = os.fork()
    if pid == 0:
        asked.close()
        _work(server, title, pipe)
    os.close(pipe)
    handle = os.pidfd_open(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    with suppress(OSError):  # whoever asked is gone: that is seen next
        socket.send_fds(asked, [pid.to_bytes(PID_BYTES, "little")], [handle])
    os.close(handle)


def _work(server: int, title: bytes, pipe: int) -> NoReturn:
    """The actor's process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_NAME, title)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it ended before that was set
            serve(Connection(pipe))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
