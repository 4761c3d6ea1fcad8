"""LoRA adapters as the cluster knows them: a name, a folder, and the digest of what is in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

DIGEST_BYTES = 16
MAX_NAME = 128
NAME = re.compile(r"[^\s/\x00-\x1f\x7f](?:[^\x00-\x1f\x7f]*[^\s/\x00-\x1f\x7f])?")


def check_name(name: str) -> str:
    """Returns the name. ValueError for a name that no adapter may have."""
    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise ValueError(f"must be a name of 1 … {MAX_NAME} characters, without control characters or / at its ends")
    return name


@dataclass(frozen=True)
class Adapter:
    """A served LoRA adapter. path: its PEFT folder, as each worker's host has it."""

    name: str
    path: str
    digest: bytes  # DIGEST_BYTES, of its weights and configuration
    rank: int = 0  # the largest rank of its modules; 0 until a worker reports it
    num_bytes: int = 0  # of host memory at each worker; 0 until a worker reports it


@dataclass(frozen=True)
class AdapterSet:
    """The adapters that the cluster serves. `version` orders the sets; each change makes the next one."""

    version: int = 0
    by_name: Mapping[str, Adapter] = field(default_factory=lambda: MappingProxyType({}))

    def __reduce__(self) -> tuple[object, ...]:
        return _thawed, (self.version, dict(self.by_name))  # it travels between processes

    def has_digest(self, digest: bytes) -> bool:
        """Returns whether some name stands for these weights."""
        return any(one.digest == digest for one in self.by_name.values())


def _thawed(version: int, by_name: dict[str, Adapter]) -> AdapterSet:
    return AdapterSet(version, MappingProxyType(by_name))


@dataclass(frozen=True)
class AdapterOrder:
    """A change of the set: the name stands for this adapter from now on, or for no adapter.

    A gateway process gives it when all workers hold the adapter; see AdapterBook.
    """

    number: int  # unique in one gateway process
    name: str
    adapter: Adapter | None
    before: bytes = b""  # the digest that the name must have for the change to happen; empty: it must be free
