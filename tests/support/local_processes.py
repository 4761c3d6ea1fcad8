"""Processes of this machine without Ray: forked from one server that has imported everything, so they start at once.

What supervises them, and what runs in them, is what runs under Ray.
"""

import atexit
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.processes.forks.forked_actor import ForkedActor
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorProcess, ActorSpec, Processes, ProcessGroup
from tests.support.shared_forks import shared_address
from tests.support.steady_steps import steady

FORK_SECONDS = 120.0
ACTORS = ("tandem.cluster.supervision.worker_actor", "tandem.cluster.supervision.gateway_actor")
READERS = "tandem.cluster.requests.reading.reader"
STEPS = "tests.support.steady_steps:watch_steps"
Member = TypeVar("Member", bound=ActorProcess)


@cache
def fork_server(*modules: str) -> ForkServer:
    """Returns one server for all tests of a run, because its imports take seconds. With further modules, which may
    change it, returns a server for this process."""
    server = ForkServer([*ACTORS, READERS, STEPS, *modules], address=None if modules else shared_address())
    atexit.register(server.close)
    return server


def started_at(pid: int) -> str:
    """Returns when that process was started, in ticks of this machine's clock; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class LocalProcesses(Processes):
    """`pids` has every process that was started and was not seen to end, by its actor's name."""

    modules: tuple[str, ...] = ()  # that its processes have imported, beside those of every actor

    def __init__(self, step_seconds: float = 0.0) -> None:
        """step_seconds: the least duration of a worker's step."""
        self._step_seconds = step_seconds
        self._actors: dict[str, ForkedActor] = {}
        self.started: list[tuple[int, str]] = []  # pid and started_at(), for a long storm uses pids again

    @property
    def pids(self) -> dict[str, int]:
        return {name: actor.pid for name, actor in list(self._actors.items()) if not actor.ended}

    def start(self, cluster: str, num_cpus: int | None) -> None:
        pass

    def check_room(self, processes: int, *, gpus: int) -> None:
        pass

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> "LocalGroup[ForkedActor]":
        assert not gpus
        return LocalGroup(self._start(specs), self._start)

    def _start(self, specs: Sequence[ActorSpec]) -> list[ForkedActor]:
        members = []
        for spec in specs:
            with steady(self._step_seconds):
                actor = fork_server(*self.modules).fork(spec.name, pack((spec.kind, spec.argument)), FORK_SECONDS)
            self._actors[spec.name] = actor
            self.started.append((actor.pid, started_at(actor.pid)))
            members.append(actor)
        return members

    def stop(self) -> None:
        for actor in self._actors.values():
            actor.kill()
            assert actor.join(10)


class LocalGroup(ProcessGroup, Generic[Member]):
    """A group of members that `start` makes, with no resources reserved for them."""

    def __init__(self, members: list[Member], start: Callable[[Sequence[ActorSpec]], list[Member]]) -> None:
        self._members = members
        self._start = start

    @property
    def members(self) -> list[Member]:
        return self._members

    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> list[Member]:
        started = self._start(specs)
        self._members += started
        return started

    def shrink(self, members: Sequence[ActorProcess]) -> None:
        for member in [member for member in self._members if member in members]:
            member.kill()
            self._members.remove(member)

    def restart(self, specs: Sequence[ActorSpec]) -> None:
        assert len(specs) <= len(self._members)
        self.end()
        self._members = self._start(specs)

    def replace(self, member: ActorProcess, spec: ActorSpec) -> Member:
        member.kill()
        (started,) = self._start([spec])
        self._members = [started if known is member else known for known in self._members]
        return started

    def end(self) -> None:
        for member in self._members:
            member.kill()
