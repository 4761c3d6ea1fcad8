"""Actors in processes of their own: what the supervisors need of whatever starts them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tandem.cluster.errors import StartFailed


@dataclass(frozen=True)
class ActorSpec:
    """An object kind(argument) in a process of its own. The name is unique while the process lives.

    modules: what it will need, to be imported before there is a process; none of them may touch a device.
    """

    name: str
    kind: type
    argument: object
    modules: tuple[str, ...] = ()


class ActorProcess(ABC):
    """One actor. Its process may end at any moment, and then every call's future fails with ProcessEnded.

    name: what those errors call it. May be set: an actor can come to be another one's successor.
    """

    name: str

    @abstractmethod
    def there(self) -> Future[None]:
        """Done when there is a process: what it needs has been imported, and its constructor begins."""

    @abstractmethod
    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Runs a method of the actor, several at a time, and does not block; what it returned or raised."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process at once; idempotent."""


class ProcessGroup(ABC):
    """Actors that were placed together."""

    @property
    @abstractmethod
    def members(self) -> Sequence[ActorProcess]:
        """In the order in which they were placed."""

    @abstractmethod
    def grow(self, specs: Sequence[ActorSpec], *, threads: int) -> Sequence[ActorProcess]:
        """Places more members, all of specs or none, where the others are; otherwise as Processes.start_group."""

    @abstractmethod
    def shrink(self, members: Sequence[ActorProcess]) -> None:
        """Kills some members and frees what was set aside for them; idempotent."""

    @abstractmethod
    def restart(self, specs: Sequence[ActorSpec]) -> None:
        """Kills every member, and when they have ended starts others in their places, with what was set aside and
        imported for them. There are no more of specs than members; places left over are given back.

        StartFailed when a place is gone: end() is what is left.
        """

    @abstractmethod
    def replace(self, member: ActorProcess, spec: ActorSpec) -> ActorProcess:
        """Kills one member, and when it has ended starts another in its place. StartFailed when the place is gone."""

    def replace_anywhere(self, member: ActorProcess, spec: ActorSpec, *, threads: int) -> ActorProcess:
        """As replace(); where the place is gone, in a new one beside the others."""
        with suppress(StartFailed):
            return self.replace(member, spec)
        self.shrink([member])
        (started,) = self.grow([spec], threads=threads)
        return started

    @abstractmethod
    def end(self) -> None:
        """Kills every member and frees what was set aside for them; idempotent."""


class Processes(ABC):
    """What starts processes. start() before anything else; stop() leaves none behind and is idempotent."""

    @abstractmethod
    def start(self, cluster: str, num_cpus: int | None) -> None:
        """Raises ClusterRunning when a cluster of that name runs there, StartFailed when nothing can be started."""

    @abstractmethod
    def check_room(self, processes: int, *, gpus: int) -> None:
        """StartFailed where there can never be so many processes at a time, with `gpus` GPUs each."""

    @abstractmethod
    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int) -> ProcessGroup:
        """Places all of specs or none, with `gpus` GPUs and `threads` compute threads each. StartFailed if it cannot.

        The actors' constructors run afterwards: one that fails ends its process.
        """

    def start_again(
        self, group: ProcessGroup | None, specs: Sequence[ActorSpec], *, gpus: int, threads: int
    ) -> ProcessGroup:
        """start_group(), in the places of `group` if they are still there: then it is what returns, else it is over."""
        if group is not None:
            with suppress(StartFailed):
                group.restart(specs)
                return group
            group.end()
        return self.start_group(specs, gpus=gpus, threads=threads)

    @abstractmethod
    def stop(self) -> None:
        """Ends whatever start() began."""
