"""An actor in a forked process, seen from the process that asked for it."""

import os
import select
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.forks.actor_server import CONSTRUCTOR, pack, read, unpack, write
from tandem.cluster.processes.processes import ActorProcess

STATUS_BYTES = 4
STATUS_SECONDS = 10.0  # a server on a busy host writes it late; the end of a server is noticed at once


class ForkedActor(ActorProcess):
    """The actor's end of a pipe. The pipe breaks when the process ends; `ended` is then set."""

    def __init__(
        self, name: str, pid: int, pidfd: int, status: int, pipe: Connection, start: bytes, lifeline: int
    ) -> None:
        """Owns pidfd, status, pipe and lifeline. start: pack((kind, argument)).

        status: a pipe that gets waitpid()'s STATUS_BYTES once the process is reaped. lifeline: the writing end of a
        pipe; the process ends when it is closed, see forked_process.end_with().
        """
        self.name = name
        self.pid = pid
        self.ended = False
        self._pidfd: int | None = pidfd
        self._status = status
        self._pipe = pipe
        self._lifeline = lifeline
        self._killed_for_memory = _killed_for_memory()
        self._lock = threading.Lock()
        self._numbers = count(CONSTRUCTOR + 1)
        self._answers: dict[int, Future[bytes]] = {}
        self._reason = ""
        with suppress(OSError):
            write(pipe, CONSTRUCTOR, start)
        self._reader = threading.Thread(target=self._read, name=f"pipe of {name}", daemon=True)
        self._reader.start()

    def there(self) -> Future[None]:
        now: Future[None] = Future()
        now.set_result(None)
        return now

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        self.relay(pack((method, arguments))).add_done_callback(lambda done: open_answer(answer, done))
        return answer

    def relay(self, payload: bytes) -> Future[bytes]:
        """Returns the answer to `payload`, which is pack((method, arguments)). open_answer() reads the answer."""
        answer: Future[bytes] = Future()
        with self._lock:
            ended = self.ended
            if not ended:
                number = next(self._numbers)
                self._answers[number] = answer
                with suppress(OSError):  # the process has ended: the reader answers, once it knows how
                    write(self._pipe, number, payload)
        if ended:
            answer.set_exception(ProcessEnded(self.name, self._reason))
        return answer

    def kill(self) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def join(self, seconds: float) -> bool:
        """Returns whether the process ends within `seconds` and has freed all that it held."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, payload = read(self._pipe)
                if number == CONSTRUCTOR:
                    error, _ = unpack(payload)
                    self._reason = f"{type(error).__name__}: {error}"
                    break
                self._answers.pop(number).set_result(payload)
        reason = self._reason or self._how_it_ended()
        with self._lock:
            self.ended, self._reason = True, reason
            self._pipe.close()
        for answer in self._answers.values():
            answer.set_exception(ProcessEnded(self.name, reason))
        self._wait_for_end()

    def _how_it_ended(self) -> str:
        try:  # it is still ending, as long as a GPU frees its memory
            status = int(Path(f"/proc/{self.pid}/stat").read_bytes().split()[-1])
        except OSError:  # its server has reaped it, and writes its status next
            received = select.select([self._status], [], [], STATUS_SECONDS)[0] and os.read(self._status, STATUS_BYTES)
            if not received:
                return "its process ended; so did the fork server, which alone would know how"
            status = int.from_bytes(received, "little")
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"its process ended with exit code {code}"
        killed = _killed_for_memory() - self._killed_for_memory if code == -signal.SIGKILL else 0
        hint = f"; meanwhile the kernel ended {killed} on this machine for want of memory" if killed > 0 else ""
        return f"its process was ended by {_signal_name(-code)}{hint}"

    def _wait_for_end(self) -> None:
        self.kill()  # without its pipe it is of no use
        assert self._pidfd is not None, "only this thread closes it"
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        ends.poll()
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = None
        os.close(self._status)
        os.close(self._lifeline)


def _killed_for_memory() -> int:
    """Returns how many processes of this machine the kernel has ended for want of memory; 0 if it does not count
    them."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def open_answer(answer: Future[Any], done: Future[bytes]) -> None:
    """Fills `answer` with what an actor's method returned or raised. done: a future of relay() that has ended."""
    try:
        raised, result = unpack(done.result())
    except Exception as error:
        raised, result = error, None
    if raised is None:
        answer.set_result(result)
    else:
        answer.set_exception(raised)
