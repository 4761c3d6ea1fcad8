"""The fork server of a host, as its clients see it: actors forked from it start in milliseconds.

All process hosts of a cluster on one host ask the same server, and so does the launcher there. They know its address,
an abstract one of AF_UNIX. A process that finds no server there starts one; a later one finds that server. fork_loop.py
is the server, and lists who owns what.
"""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe

from tandem.cluster.errors import StartFailed
from tandem.cluster.processes.forks import fork_loop
from tandem.cluster.processes.forks.fork_orders import (
    ForkOrder,
    is_ours,
    order_from_here,
    receive_answer,
    send_order,
)
from tandem.cluster.processes.forks.forked_actor import ForkedActor

BACKLOG = 1024
STARTS = 3  # by one order, of servers that end before they answer
RETRY_SECONDS = 0.05
ANSWER_SECONDS = 30.0  # a fork takes milliseconds, once the imports are done; those for another client may come between
END_SECONDS = 10.0
REAP_SECONDS = 1.0
# The imports make threads that spin while idle, which would take cores from other processes.
THREADS: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def new_address() -> str:
    """Returns the address of a new server, which nobody else will find by accident. It has no file."""
    return f"tandem/forks/{secrets.token_hex(16)}"


class ForkServer:
    """A client that stays: while it is open, the server is there, or starts again. fork() is safe from any thread."""

    def __init__(self, modules: Sequence[str], title: str = "", address: str | None = None) -> None:
        """Returns at once. modules: what the server imports before it forks for this client; for `module:name` it also
        calls the function `name`. title: the cluster's name, which `ps` shows. address: of a server that others know,
        too.

        Failed imports are skipped: the actor that needs one reports it. If an import touches a GPU, all are skipped.
        """
        self.address = address or new_address()
        self._modules = tuple(modules)
        self._title = title
        self._child: int | None = None  # the server beside() this process, until it is reaped
        self._started: int | None = None  # the pidfd of a server that was started here and has not answered yet
        self._closed = False
        self._lock = threading.Lock()
        self._server: tuple[int, int] | None = None  # its pid and pidfd, once its imports are done
        self._changed = threading.Condition(self._lock)
        self._stay: socket.socket | None = None
        self._keeper = threading.Thread(target=self._keep, name="fork server", daemon=True)
        self._keeper.start()

    @classmethod
    def beside(cls, modules: Sequence[str], title: str) -> "ForkServer":
        """Forks a server from this process: it has all that this process has imported, and imports the rest of
        `modules` meanwhile. Needs a process without threads, which may start some afterwards; with threads this is
        ForkServer(modules, title)."""
        address = new_address()
        if threading.active_count() == 1:
            listener = _listen(address)
            assert listener is not None, "nobody else has the address"
            child = _fork_here(listener, modules, title)
            listener.close()
        else:
            child = None
        server = cls(modules, title, address)
        server._child = child
        return server

    @property
    def pid(self) -> int:
        """Returns the server's pid once its imports are done, and waits for them."""
        with self._changed:
            self._changed.wait_for(lambda: self._server is not None or self._closed)
            return self._server[0] if self._server is not None else 0

    def fork(self, name: str, start: bytes, seconds: float) -> ForkedActor:
        """Returns a new actor, whose constructor now runs. It ends with this process. start: pack((kind, argument)).

        StartFailed when there is no answer within `seconds`, because the server still imports or hangs, and when STARTS
        servers have ended meanwhile.
        """
        order, deadline = order_from_here(name, self._modules), time.monotonic() + seconds
        for _ in range(STARTS):
            try:
                return self._ask(order, start, deadline)
            except TimeoutError:
                raise StartFailed(
                    f"{name} cannot be started: no answer within {seconds:g} s from what would fork it"
                ) from None
            except (EOFError, OSError):
                if self._closed:
                    break
        raise StartFailed(f"{name} cannot be started: what would fork it has ended; its stderr may say why")

    def _ask(self, order: ForkOrder, start: bytes, deadline: float) -> ForkedActor:
        """Asks the server for an actor. TimeoutError past the deadline. EOFError or OSError when the server ends
        meanwhile."""
        asked = self._connected(deadline)
        pipe, theirs = Pipe()
        read, lifeline = os.pipe()
        try:
            with asked, theirs:
                send_order(asked, order, [theirs.fileno(), read, 1, 2])
                self._await_answer(asked, deadline)
                pid, (pidfd, status) = receive_answer(asked, 2)
        except BaseException:
            pipe.close()
            os.close(lifeline)
            raise
        finally:
            os.close(read)
        return ForkedActor(order.name, pid, pidfd, status, pipe, start, lifeline)

    def _connected(self, deadline: float) -> socket.socket:
        while True:
            asked = _connect(self.address)
            if asked is not None:
                asked.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
                return asked
            if self._closed:
                raise EOFError("closed")
            if time.monotonic() >= deadline:
                raise TimeoutError
            self._start()

    def _await_answer(self, asked: socket.socket, deadline: float) -> None:
        """Once the server's imports are done, a server that does not answer is killed: its spare takes over."""
        ready = select.poll()
        ready.register(asked, select.POLLIN)
        silent_since: float | None = None
        while not ready.poll(1000 * min(0.25, max(0.0, deadline - time.monotonic()))):
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError
            with self._lock:
                silent_since = (silent_since or now) if self._server is not None else None
                if silent_since is not None and now - silent_since > ANSWER_SECONDS and self._server is not None:
                    _kill(self._server[1])

    def close(self) -> None:
        """Leaves the server. It ends with its last client, and then this waits for its end. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if self._stay is not None:
                with suppress(OSError):
                    self._stay.shutdown(socket.SHUT_WR if self._server is not None else socket.SHUT_RDWR)
            if self._server is None:
                self._end_importing()
            self._changed.notify_all()
        self._keeper.join(2 * END_SECONDS)
        with self._lock:
            if self._started is not None:  # the keeper was about to start one
                _kill(self._started)
            self._forget_started()
        self._reap()

    def _keep(self) -> None:
        """The keeper's thread: stays connected to the server, whichever it is."""
        failures = 0
        while not self._closed:
            asked = _connect(self.address)
            if asked is None:
                if failures:
                    time.sleep(min(1.0, RETRY_SECONDS * 2**failures))
                if not self._closed:
                    self._start()
                failures = min(failures + 1, 10)
                continue
            with asked:
                try:
                    self._stay_at(asked)
                    failures = 0
                except (EOFError, OSError):
                    time.sleep(RETRY_SECONDS)
            self._reap()

    def _stay_at(self, asked: socket.socket) -> None:
        """Returns when the server has ended, or this client is closed."""
        with self._lock:
            if self._closed:
                return
            self._stay = asked
        send_order(asked, ForkOrder(modules=self._modules))
        pid, (pidfd,) = receive_answer(asked, 1)
        with self._changed:
            self._server = pid, pidfd
            self._forget_started()
            self._changed.notify_all()
        lives_on = False
        with suppress(OSError):
            lives_on = bool(asked.recv(1))
        with self._lock:
            self._server, self._stay = None, None
        if not lives_on:  # it ends, which takes a moment
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            ended.poll(1000 * (END_SECONDS if self._closed else REAP_SECONDS))
        os.close(pidfd)

    def _start(self) -> None:
        """Starts a server, unless another client just does."""
        listener = _listen(self.address)
        if listener is None:
            time.sleep(RETRY_SECONDS)  # it is bound, and listens next
            return
        with listener:
            program = fork_loop.command(listener.fileno(), self._modules, self._title)
            # It is no child of this process, so that Ray does not end it with this one, and init reaps it.
            program[2] = f"import os; pid = os.fork(); pid and (print(pid, flush=True), os._exit(0)); {program[2]}"
            started = subprocess.run(
                program,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=os.environ | THREADS | {"PYTHONPATH": os.pathsep.join(sys.path)},
                check=False,
            )
        with self._lock, suppress(OSError, ValueError):  # it has ended
            self._forget_started()
            self._started = os.pidfd_open(int(started.stdout))

    def _end_importing(self) -> None:
        """Kills a server that was started here and still imports. Other clients start it again."""
        if self._started is not None:
            _kill(self._started)
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def _forget_started(self) -> None:
        if self._started is not None:
            os.close(self._started)
            self._started = None

    def _reap(self) -> None:
        if self._child is not None and os.waitpid(self._child, os.WNOHANG)[0]:
            self._child = None


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _connect(address: str) -> socket.socket | None:
    """Connects to a server. None when no server listens there."""
    asked = socket.socket(socket.AF_UNIX)
    try:
        asked.connect(f"\0{address}")
        if is_ours(asked):
            return asked
    except OSError:
        pass
    asked.close()
    return None


def _listen(address: str) -> socket.socket | None:
    """Listens at the address. None when a server does already."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{address}")
        listener.listen(BACKLOG)
        return listener
    except OSError:
        listener.close()
        return None


def _fork_here(listener: socket.socket, modules: Sequence[str], title: str) -> int:
    """Forks a server as this process's child. Returns its pid."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a handler must not run in the child
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads of a BLAS, which handles forks itself
            pid = os.fork()
        if pid:
            return pid
        try:
            _leave_parent(listener.fileno())
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            fork_loop.run(listener.detach(), modules, title)
        finally:
            os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _leave_parent(kept: int) -> None:
    """Lets go of the parent's handlers and files in a forked server; stderr stays. Their numbers stay taken, so that an
    object of the parent's that closes its own closes nothing else."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (2, kept, nothing):
            with suppress(OSError):  # it was that of the listing
                os.fstat(int(name))
                os.dup2(nothing, int(name), inheritable=int(name) < 3)
