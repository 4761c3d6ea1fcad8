"""Actors in processes of their own: what the supervisors need of whatever starts them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ActorSpec:
    """An object kind(argument) in a process of its own. The name is unique while the process lives."""

    name: str
    kind: type
    argument: object


class ActorProcess(ABC):
    """One actor. Its process may end at any moment, and then every call's future fails with ProcessEnded."""

    name: str

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
    def end(self) -> None:
        """Kills every member and frees what was set aside for them; idempotent."""


class Processes(ABC):
    """What starts processes. start() before anything else; stop() leaves none behind and is idempotent."""

    @abstractmethod
    def start(self, cluster: str, num_cpus: int | None) -> None:
        """Raises ClusterRunning when a cluster of that name runs there, StartFailed when nothing can be started."""

    @abstractmethod
    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int) -> ProcessGroup:
        """Places all of specs or none, with `gpus` GPUs and `threads` compute threads each. StartFailed if it cannot.

        The actors' constructors run afterwards: one that fails ends its process.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends whatever start() began."""
