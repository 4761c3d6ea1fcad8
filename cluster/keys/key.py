"""One caller's key: its name, and what it may do."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, sha256


@dataclass(frozen=True)
class PriorityBounds:
    """The numbers that requests of a key may ask for. Lower ones go first."""

    lowest: int
    highest: int


@dataclass(frozen=True)
class Key:
    """An entry of the keys file. sha256: 32 bytes, the digest of the key itself. None sets no limit."""

    name: str
    sha256: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and outputs together
    priority: PriorityBounds | None = None
    models: frozenset[str] | None = None  # names of models and adapters

    @cached_property
    def id(self) -> int:
        """1 … 2**63 - 1, by which gateway processes of all hosts know the name."""
        digest = blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key, which the file has in its place."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()
