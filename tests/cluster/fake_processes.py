"""Fake processes: a test decides when they answer, fail and end."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.errors import NoRoom, ProcessEnded, StartFailed
from tandem.cluster.gateway.settings import GatewayAddresses
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes
from tests.support.local_processes import LocalGroup

ANSWERS: dict[str, Any] = {"progress": ("weights", 1, 2), "open": b"handle", "placed_tokens": 0, "unfinished": 0}
ADDRESS = "127.0.0.1:1"


def no_answer(method: str) -> None:
    """Returns None, as most methods do."""


def room_of_each(pages: Iterator[int]) -> Callable[[str], Any]:
    """Returns the answers of processes that have room for so many pages, one after another."""
    return lambda method: next(pages) if method == "pages_that_fit" else None


class FakeProcess(ActorProcess):
    """Answers every call at once, except wait() and the methods in `silent`; `fails` has the errors of other
    methods."""

    def __init__(self, name: str, answers: Callable[[str], Any] = no_answer) -> None:
        self.name = name
        self._answers = answers
        self.silent_for = 0.0
        self.held_up = False
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.silent: set[str] = {"wait", "next_order"}
        self.fails: dict[str, Exception] = {}
        self.killed = False
        self.ends_at = ""
        self._pending: list[tuple[str, Future[Any]]] = []

    def there(self) -> Future[None]:
        return self.call("there")

    @property
    def silent_seconds(self) -> float:
        return self.silent_for

    @property
    def is_held_up(self) -> bool:
        return self.held_up

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        self.calls.append((method, arguments))
        if method == self.ends_at:
            self.kill()
        if self.killed:
            answer.set_exception(ProcessEnded(self.name, "killed"))
        elif method in self.fails:
            answer.set_exception(self.fails[method])
        elif method in self.silent:
            self._pending.append((method, answer))
        else:
            answer.set_result(self._answer(method))
        return answer

    def _answer(self, method: str) -> Any:
        if method == "serve":
            return GatewayAddresses(ADDRESS, "127.0.0.1:2") if "/gateway." in self.name else ADDRESS
        return ANSWERS[method] if method in ANSWERS else self._answers(method)

    def awaits(self, method: str) -> bool:
        """Returns whether a call of a silent method has no answer yet."""
        return any(name == method and not answer.done() for name, answer in self._pending)

    def answer_pending(self, method: str, result: object) -> None:
        """Answers the first call of a silent method after all."""
        next(answer for name, answer in self._pending if name == method and not answer.done()).set_result(result)

    def kill(self) -> None:
        self.killed = True
        for _, answer in self._pending:
            if not answer.done():
                answer.set_exception(ProcessEnded(self.name, "killed"))


class FakeGroup(LocalGroup[FakeProcess]):
    keeps_places = False  # see FakeProcesses

    def restart(self, specs: Sequence[ActorSpec]) -> None:
        if not self.keeps_places:
            raise StartFailed("a place is gone")
        super().restart(specs)

    def replace(self, member: ActorProcess, spec: ActorSpec) -> FakeProcess:
        if not self.keeps_places:
            raise StartFailed("a place is gone")
        return super().replace(member, spec)


@dataclass
class FakeProcesses(Processes):
    """fails: the errors of load(), by the name of a process; answers: further answers, beyond ANSWERS."""

    fails: dict[str, Exception] = field(default_factory=dict)
    groups: list[FakeGroup] = field(default_factory=list)
    specs: list[list[ActorSpec]] = field(default_factory=list)
    answers: Callable[[str], Any] = no_answer
    room: int = 100  # the most that can be started at once
    keeps_places: bool = False  # whether a group can start others in its members' places
    silent: set[str] = field(default_factory=set)  # methods that processes started from now on do not answer
    ends_at: str = ""  # the method at which they end

    def start(self, cluster: str, num_cpus: int | None) -> None:
        pass

    def check_room(self, processes: int, *, gpus: int) -> None:
        pass

    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE) -> FakeGroup:
        group = FakeGroup(self._start(specs), self._start)
        group.keeps_places = self.keeps_places
        self.groups.append(group)
        return group

    def _start(self, specs: Sequence[ActorSpec]) -> list[FakeProcess]:
        if len(specs) > self.room:
            raise NoRoom(f"no room for {len(specs)} processes")
        members = [FakeProcess(spec.name, self.answers) for spec in specs]
        for member in members:
            if member.name in self.fails:
                member.fails["load"] = self.fails[member.name]
            member.silent |= self.silent
            member.ends_at = self.ends_at
        self.specs.append(list(specs))
        return members

    def stop(self) -> None:
        pass
