"""The contents of NVSHMEM's handles: a PE's host, and PE 0's unique id."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.transfer.errors import MembershipRefused
from tandem.transfer.membership import Detail


def bytes_of(unique_id: Any) -> np.ndarray:
    return unique_id._data.view(np.uint8)


def unique_id_of(detail: Detail, num_bytes: int) -> np.ndarray:
    text = str(detail.get("unique_id"))
    try:
        value = np.frombuffer(bytes.fromhex(text), np.uint8)
    except ValueError:
        value = np.empty(0, np.uint8)
    if value.size != num_bytes:
        raise MembershipRefused(f"PE 0's handle has unique_id {text!r:.80}; {num_bytes} bytes in hex are expected")
    return value


def check_hosts(details: Sequence[Detail]) -> None:
    """MembershipRefused, the same on every PE, unless all are on one host.

    Puts could reach other hosts, but have been tested within one only.
    """
    for pe, detail in enumerate(details):
        if detail.get("host") != details[0].get("host"):
            raise MembershipRefused(f"PE 0 and PE {pe} are on different hosts; an island must be on one")
