"""Counts what a worker has done, refused and taken back since it started."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Field by field as in inference.proto's WorkerCounters, which also has the worker's tokens. Owned by the step
    thread."""

    stale_calls: int = 0
    stale_signals: int = 0
    expired_leases: int = 0
    recalled: int = 0
    corrupt: int = 0
    reservations: int = 0
    drains: int = 0
    pushes: int = 0
    bytes_pushed: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    parks: int = 0
    resumes: int = 0
