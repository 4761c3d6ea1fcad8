"""The process that forks all actors of a host: it has imported what they need, and so has its spare.

                    listening socket, of both
    client ──order──►┌───────────────┐  fork   ┌───────────────┐
    client ──order──►│  fork server  ├────────►│     spare     │ waits until the server is gone, then is the server
                     └───┬───────┬───┘         └───────────────┘ and forks a spare of its own
                    fork │       │ fork
                       actor   actor

The server runs no thread and touches no device, so a fork is whole. Actors share its memory until they write to it.
Who owns what:

- A client that stays keeps the server. With the last one it ends, and so does its spare.
- An actor belongs to the process that asked for it, and ends with that one (forked_process.py), not with the server.
- The server reaps its actors and tells how they ended. After its own end nobody knows that.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from tandem.cluster.processes.forks.actor_server import set_title
from tandem.cluster.processes.forks.fork_orders import ForkOrder, close_all, is_ours, receive_order, send_answer
from tandem.cluster.processes.forks.forked_actor import STATUS_BYTES
from tandem.cluster.processes.forks.forked_process import become_actor

CUDA_ERROR_NOT_INITIALIZED = 3
ORDER_SECONDS = 5.0  # an order is sent at once
ALONE_SECONDS = 10.0  # without a client: clients come back to a spare that has become the server
POLL_SECONDS = 1.0
LEAVE = b"l"  # to the spare: the server ends because nobody needs it


def run(listener: int, modules: Sequence[str], title: str, imports: bool = True) -> NoReturn:
    """Runs the server. listener: a listening socket. imports: whether it imports anything: `modules` and the modules of
    orders."""
    try:
        with suppress(PermissionError):
            os.setsid()  # signals of a terminal are not for it
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        _ForkLoop(socket.socket(fileno=listener), title, imports).run(modules)
    finally:
        os._exit(0)


def command(listener: int, modules: Sequence[str], title: str, imports: bool = True) -> list[str]:
    """Returns the command that runs a server in a new process."""
    arguments = f"{listener}, {list(modules)!r}, {title!r}, {imports}"
    return [sys.executable, "-c", f"from tandem.cluster.processes.forks.fork_loop import run; run({arguments})"]


class _ForkLoop:
    def __init__(self, listener: socket.socket, title: str, imports: bool) -> None:
        self._listener = listener
        self._address: str = listener.getsockname()[1:].decode()  # behind the zero byte of an abstract one
        self._title = title
        self._imports = imports
        self._imported: set[str] = set()
        self._stays: dict[int, socket.socket] = {}  # connections of clients that stay
        self._ends: dict[int, int] = {}  # where to write, by pid, how an actor ended
        self._spare: socket.socket | None = None
        self._alone_until = time.monotonic() + ALONE_SECONDS

    def run(self, modules: Sequence[str]) -> NoReturn:
        self._set_title("fork server")
        gc.disable()  # all that is imported stays
        self._import(modules)
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        self._alone_until = time.monotonic() + ALONE_SECONDS
        while True:
            if self._spare is None:
                self._make_spare()
            self._look()

    def _set_title(self, what: str) -> None:
        set_title(f"{self._title}/{what}" if self._title else what)

    def _import(self, modules: Sequence[str]) -> None:
        """Failed imports are skipped: the actor that needs one reports it. If an import touches a GPU, this process
        begins anew and skips all imports."""
        missing = [entry for entry in modules if entry not in self._imported] if self._imports else []
        if not missing:
            return
        for entry in missing:
            self._imported.add(entry)
            module, _, function = entry.partition(":")
            with suppress(Exception):
                imported = import_module(module)
                if function:
                    getattr(imported, function)()
        if _has_touched_gpu():
            self._dismiss_spare()
            os.set_inheritable(self._listener.fileno(), True)
            os.execv(sys.executable, command(self._listener.fileno(), (), self._title, imports=False))
        gc.collect()
        gc.freeze()  # a collection in an actor would write to shared memory, and so copy it
        self._dismiss_spare()  # it lacks them

    def _look(self) -> None:
        """Serves the orders that have come; ends this process if nobody needs it."""
        ready = select.poll()
        for waiting in (self._listener, self._spare, *self._stays.values()):
            if waiting is not None:
                ready.register(waiting, select.POLLIN)
        listening = self._listener.fileno()
        # Orders come last: their descriptors may take the numbers of what was closed before.
        for descriptor, _ in sorted(ready.poll(POLL_SECONDS * 1000), key=lambda event: event[0] == listening):
            if descriptor == listening:
                self._accept()
            elif descriptor in self._stays:  # nothing is sent there: it was closed
                self._let_go(self._stays.pop(descriptor))
            elif self._spare is not None:  # the spare has ended
                self._spare.close()
                self._spare = None
        if not self._stays and time.monotonic() > self._alone_until:
            self._dismiss_spare()
            os._exit(0)

    def _accept(self) -> None:
        asked, _ = self._listener.accept()
        asked.settimeout(ORDER_SECONDS)
        descriptors: list[int] = []
        try:
            if not is_ours(asked):
                raise EOFError("a process of another user")
            order, descriptors = receive_order(asked)
            self._import(order.modules)
            if not order.name:
                self._keep(asked)
                return
            self._fork(asked, order, descriptors)
        except (EOFError, OSError):
            pass  # it is gone, and its actor ends with it; or there is no memory for a process
        finally:
            close_all(descriptors)
        asked.close()

    def _keep(self, asked: socket.socket) -> None:
        handle = os.pidfd_open(os.getpid())
        try:
            send_answer(asked, os.getpid(), [handle])
        finally:
            os.close(handle)
        self._stays[asked.fileno()] = asked

    def _let_go(self, client: socket.socket) -> None:
        """Tells a client whether this server lives on, for others."""
        if self._stays:
            with suppress(OSError):
                client.send(b"1")
        else:
            self._alone_until = 0.0
        client.close()

    def _fork(self, asked: socket.socket, order: ForkOrder, descriptors: Sequence[int]) -> None:
        status, end = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # a process must not be reaped before its pidfd
        try:
            pid = os.fork()
            if pid == 0:
                asked.close()
                close_all([status, end])
                self._drop_all()
                gc.enable()
                become_actor(order, descriptors, self._address)
            self._ends[pid] = os.dup(end)
            handle = os.pidfd_open(pid)
        except OSError:
            close_all([status])
            raise
        finally:
            close_all([end])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        try:
            send_answer(asked, pid, [handle, status])
        finally:
            close_all([handle, status])

    def _make_spare(self) -> None:
        """Forks the spare. Returns at once in the server. In the spare it returns once the server has ended: then the
        spare is the server."""
        while True:
            ours, theirs = socket.socketpair()
            try:
                is_server = os.fork() != 0
            except OSError:  # no memory for a process: the next look at orders tries again
                ours.close()
                theirs.close()
                return
            if is_server:
                theirs.close()
                self._spare = ours
                return
            ours.close()
            listener = self._listener.dup()
            self._drop_all()
            self._listener = listener
            self._set_title("spare fork server")
            if theirs.recv(1) == LEAVE:
                os._exit(0)
            theirs.close()
            self._set_title("fork server")
            self._alone_until = time.monotonic() + ALONE_SECONDS

    def _dismiss_spare(self) -> None:
        if self._spare is not None:
            with suppress(OSError):
                self._spare.send(LEAVE)
            self._spare.close()
            self._spare = None

    def _drop_all(self) -> None:
        """Closes what only the server has. A process that was just forked calls this."""
        for mine in (self._listener, self._spare, *self._stays.values()):
            if mine is not None:
                mine.close()
        close_all(list(self._ends.values()))
        self._spare, self._stays, self._ends = None, {}, {}

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                end = self._ends.pop(pid, None)
                if end is None:
                    continue  # it was the spare
                with suppress(BrokenPipeError):  # nobody wants to know
                    os.write(end, status.to_bytes(STATUS_BYTES, "little"))
                os.close(end)


def _has_touched_gpu() -> bool:
    """Returns whether this process has initialised CUDA, which does not survive a fork."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False  # it is not even loaded
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED
