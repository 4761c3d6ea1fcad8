"""Turns a process that was just forked into an actor, and ties it to the process that asked for it."""

import fcntl
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from tandem.cluster.processes.forks.actor_server import serve, set_title
from tandem.cluster.processes.forks.fork_orders import ForkOrder

F_SETSIG = 10  # of fcntl(2); Python has no name for it
FORKED_BY = "TANDEM_FORKED_BY"


def become_actor(order: ForkOrder, descriptors: Sequence[int], server: str) -> NoReturn:
    """Becomes the order's actor. descriptors: the order's, which this process then owns. server: the address of the
    server that forked it."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        pipe, lifeline, stdout, stderr = descriptors
        if end_with(lifeline):
            _take_over(order, stdout, stderr)
            os.environ[FORKED_BY] = server
            serve(Connection(pipe))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def forked_by() -> str | None:
    """Returns the address of the fork server that this process comes from, so that it may ask it, too. None if it comes
    from none."""
    return os.environ.get(FORKED_BY)


def end_with(lifeline: int) -> bool:
    """Lets the kernel kill this process when the last writer of the pipe `lifeline` closes it or ends. Nobody may write
    there. This works even if the process is stopped, or a kernel holds its interpreter. Returns whether there still is
    a writer."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(lifeline, 0)
    return not ended.poll(0)  # it may have ended before


def _take_over(order: ForkOrder, stdout: int, stderr: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(order.environment)
    with suppress(OSError):
        os.chdir(order.folder)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write(str(order.oom_score))
    os.nice(max(0, order.niceness - os.getpriority(os.PRIO_PROCESS, 0)))
    set_title(order.name)
