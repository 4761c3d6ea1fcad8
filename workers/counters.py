"""What a worker refused or took back, since it started."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Field by field as in inference.proto's WorkerCounters. Owned by the step thread."""

    stale_calls: int = 0
    stale_signals: int = 0
    expired_leases: int = 0
    recalled: int = 0
    corrupt: int = 0
