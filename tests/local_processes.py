"""Processes of this machine without Ray: forked from a server that has imported everything, so they start at once.

What supervises them, and what runs in them, is what runs under Ray.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes import ActorProcess, ActorSpec, Processes, ProcessGroup


class LocalProcesses(Processes):
    """`pids` has every process that was started and was not seen to end, by its actor's name."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tandem.cluster.actors", "pytest"])  # each process imports "__main__"
        self._actors: dict[str, LocalActor] = {}
        self.started_pids: list[int] = []

    @property
    def pids(self) -> dict[str, int]:
        return {name: actor.pid for name, actor in list(self._actors.items()) if not actor.ended}

    def start(self, cluster: str, num_cpus: int | None) -> None:
        pass

    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int) -> "LocalGroup":
        assert not gpus
        return LocalGroup(self._start(specs), self._start)

    def _start(self, specs: Sequence[ActorSpec]) -> list["LocalActor"]:
        members = []
        for spec in specs:
            actor = LocalActor(self._context, spec)
            self._actors[spec.name] = actor
            self.started_pids.append(actor.pid)
            members.append(actor)
        return members

    def stop(self) -> None:
        for actor in list(self._actors.values()):
            actor.kill()
            actor.join()


class LocalGroup(ProcessGroup):
    def __init__(self, members: list["LocalActor"], start: Callable[[Sequence[ActorSpec]], list["LocalActor"]]) -> None:
        self._members = members
        self._start = start

    @property
    def members(self) -> list["LocalActor"]:
        return self._members

    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> list["LocalActor"]:
        started = self._start(specs)
        self._members += started
        return started

    def shrink(self, members: Sequence[ActorProcess]) -> None:
        for member in [member for member in self._members if member in members]:
            member.kill()
            self._members.remove(member)

    def end(self) -> None:
        self.shrink(self._members)


class LocalActor(ActorProcess):
    """Calls and answers go over a pipe, which breaks when the process ends."""

    def __init__(self, context: Any, spec: ActorSpec) -> None:
        self.name = spec.name
        self.ended = False
        self._pipe, theirs = context.Pipe()
        self._lock = threading.Lock()
        self._numbers = count()
        self._calls: dict[int, Future[Any]] = {}
        self._process = context.Process(target=_serve, args=(theirs, spec.kind, spec.argument), name=spec.name)
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"pipe of {spec.name}", daemon=True)
        self._reader.start()

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = answer
            try:
                if self.ended:
                    raise BrokenPipeError
                self._pipe.send((number, method, arguments))
            except OSError:
                del self._calls[number]
                answer.set_exception(ProcessEnded(self.name, "its pipe is broken"))
        return answer

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._reader.join(10)
        self._process.join(10)
        self._process.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, error, result = self._pipe.recv()
                answer = self._calls.pop(number)
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)
        with self._lock:
            self.ended = True
            self._pipe.close()
        for answer in self._calls.values():
            answer.set_exception(ProcessEnded(self.name, "its pipe is broken"))


def _serve(pipe: Connection, kind: type, argument: object) -> None:
    """The process: one thread a call. It ends with the pipe, so also when its parent is killed."""
    lock = threading.Lock()
    actor: Any = None

    def answer(number: int, method: str, arguments: tuple[object, ...]) -> None:
        try:
            message = (number, None, getattr(actor, method)(*arguments))
        except Exception as error:
            message = (number, error, None)
        with lock, suppress(OSError):
            pipe.send(message)

    try:
        actor = kind(argument)
        while True:
            threading.Thread(target=answer, args=pipe.recv(), daemon=True).start()
    finally:
        os._exit(0)
