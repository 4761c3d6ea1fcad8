"""The record of an adapter that a worker holds, as it tells others."""

from typing import NamedTuple


class HeldAdapter(NamedTuple):
    """digest: 16 bytes, of its weights and configuration. rank: the largest of its modules. bytes: of host memory.
    resident: it is on the device, too. sequences: that use it now. removed: it ends with the last such sequence."""

    digest: bytes
    name: str
    rank: int
    bytes: int
    resident: bool = False
    sequences: int = 0
    removed: bool = False
