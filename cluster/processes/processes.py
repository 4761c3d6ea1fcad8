"""Actors in processes of their own, as supervisors see them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tandem.cluster.errors import StartFailed, TandemError
from tandem.cluster.processes.placement import ANYWHERE, Where

LOOPBACK_HOST = "127.0.0.1"


@dataclass(frozen=True)
class ActorSpec:
    """An object kind(argument) in a process of its own."""

    name: str  # unique while the process lives
    kind: type
    argument: object
    modules: tuple[str, ...] = ()  # imported before there is a process; they touch no device
    place: str = ""  # neighbours that name the same place share a host and a bundle of its resources


class ActorProcess(ABC):
    """One actor. Its process may end at any moment; every call's future then fails with ProcessEnded."""

    name: str  # for those errors; it changes when the actor takes another's place
    host: str = LOOPBACK_HOST
    """The address of its host, as the others know it."""

    @property
    def silent_seconds(self) -> float:
        """The seconds for which its host, if it is another one, has not answered."""
        return 0.0

    @property
    def is_held_up(self) -> bool:
        """True if the process cannot start now, because what starts processes is away."""
        return False

    @abstractmethod
    def there(self) -> Future[None]:
        """Ends when the process exists: its imports are done, and its constructor begins."""

    @abstractmethod
    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Runs a method of the actor, concurrently with other calls. Does not block. The future has the method's
        result."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process at once; idempotent."""


class ProcessGroup(ABC):
    """Actors that were placed together."""

    @property
    @abstractmethod
    def members(self) -> Sequence[ActorProcess]:
        """The processes in the order in which they were placed."""

    @abstractmethod
    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> Sequence[ActorProcess]:
        """Places more members beside the others, all of specs or none. See Processes.start_group."""

    @abstractmethod
    def shrink(self, members: Sequence[ActorProcess]) -> None:
        """Kills some members and frees their resources; idempotent."""

    @abstractmethod
    def restart(self, specs: Sequence[ActorSpec]) -> None:
        """Kills every member, then starts others in their places, with their resources and imports.

        There are at most as many specs as members; places left over are given back. StartFailed when a place is gone:
        only end() may follow.
        """

    @abstractmethod
    def replace(self, member: ActorProcess, spec: ActorSpec) -> ActorProcess:
        """Kills one member, then starts another in its place. StartFailed when the place is gone."""

    def replace_anywhere(
        self, members: Sequence[ActorProcess], specs: Sequence[ActorSpec], *, threads: int
    ) -> Sequence[ActorProcess]:
        """Replaces all members of one place as replace() does, or in a new place beside the others if the old one is
        gone."""
        started: list[ActorProcess] = []
        with suppress(StartFailed):
            for member, spec in zip(members, specs, strict=True):
                started.append(self.replace(member, spec))
            return started
        self.shrink([*members, *started])
        return self.grow(specs, threads=threads)

    def end(self) -> None:
        """Kills every member and frees their resources; idempotent."""
        self.shrink(self.members)


class Processes(ABC):
    """Starts processes. start() comes first; stop() leaves none behind and is idempotent."""

    @abstractmethod
    def start(self, cluster: str, num_cpus: int | None) -> None:
        """Raises ClusterRunning when a cluster of that name runs there, StartFailed when nothing can be started."""

    def watch(self, lost: Callable[[TandemError], None], away: Callable[[str], None]) -> None:
        """Watches what runs the processes; call start() first. Calls `lost` once, from another thread, if it is lost.
        The processes then end.

        away: gets the reason why nothing can be started while processes go on, and "" once it can.
        """
        return None

    def lease(self, partition_seconds: float, seconds: float) -> None:
        """Makes processes on other hosts end themselves when they have heard nothing from this one for so many seconds.
        Call it after start() and before any process starts. partition_seconds: how long a link may be down."""
        return None

    @property
    def hosts(self) -> Sequence[str]:
        """The addresses of all present hosts, after start(). RayAway while they are not known."""
        return (LOOPBACK_HOST,)

    def hosts_for(self, where: Where) -> Sequence[str]:
        """Returns the `hosts` that a group may go to, with room or without."""
        return self.hosts

    @abstractmethod
    def check_room(self, processes: int, *, gpus: int) -> None:
        """StartFailed if there can never be so many processes at a time, with `gpus` GPUs each."""

    @property
    def address(self) -> str:
        """The address of what places the processes, after start(); empty if nothing else can use it."""
        return ""

    def free_places(self, most: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> int:
        """Returns how many groups, `most` at most, hosts have room for now. The room may be gone a moment later.
        places: the number of processes in each place of a group. Raises StartFailed if there is no host any more."""
        return most

    def ask_for_places(self, groups: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> None:
        """Asks for hosts with room for so many groups in all, running ones included; 0 withdraws the request. places:
        see free_places(). Hosts come later, or never."""
        return None

    @abstractmethod
    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> ProcessGroup:
        """Places all of specs or none on one host, or spread over hosts where `where` says so, with `gpus` GPUs and
        `threads` compute threads each. Specs of one place always share a host. Raises StartFailed, which says what
        each host has free.

        The actors' constructors run afterwards; a failing one ends its process.
        """

    def start_again(
        self,
        group: ProcessGroup | None,
        specs: Sequence[ActorSpec],
        *,
        gpus: int,
        threads: int,
        where: Where = ANYWHERE,
    ) -> ProcessGroup:
        """Restarts `group` if its places are still there; else ends it and starts a new group."""
        if group is not None:
            with suppress(StartFailed):
                group.restart(specs)
                return group
            group.end()
        return self.start_group(specs, gpus=gpus, threads=threads, where=where)

    @abstractmethod
    def stop(self) -> None:
        """Ends whatever start() began."""


def by_place(specs: Sequence[ActorSpec]) -> list[list[ActorSpec]]:
    """Groups specs by place, in their order."""
    runs = groupby(enumerate(specs), key=lambda numbered: numbered[1].place or numbered[0])
    return [[spec for _, spec in run] for _, run in runs]


def cluster_of(name: str) -> str:
    """Returns the name of the cluster that begins an actor's name."""
    return name.partition("/")[0]
