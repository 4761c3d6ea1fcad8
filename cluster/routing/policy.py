"""Routing policies: from the workers' loads to the order in which pairs of workers are asked for room.

A policy is a pure function with an entry in POLICIES; gateway.routing_policy names the one in use.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tandem.workers.config import Role


class WorkerLoad(NamedTuple):
    """One worker that takes requests, as the gateway knows it."""

    island: str
    pe: int
    role: Role
    load: int  # tokens that the gateway's processes have placed there and not taken back
    reachable: bool  # False for a moment after a failed call


Pair = tuple[WorkerLoad, WorkerLoad]
"""A decode worker and a prefill worker of the same island."""

Policy = Callable[[Sequence[WorkerLoad], int], list[Pair]]
"""Takes the loads, grouped by island, and the number of choices made before. Returns pairs, the best one first.

A pair that is left out gets no request. The gateway tries the pairs in order until a decode worker has room.
"""


def least_loaded(workers: Sequence[WorkerLoad], turn: int) -> list[Pair]:
    """Every reachable decode worker by load, each with the least loaded reachable prefill worker of its island."""
    best: dict[str, WorkerLoad] = {}
    for worker in workers:
        if worker.role == Role.PREFILL and worker.reachable:
            rival = best.get(worker.island)
            if rival is None or worker.load < rival.load:
                best[worker.island] = worker
    decodes = [one for one in workers if one.role == Role.DECODE and one.reachable and one.island in best]
    return [(decode, best[decode.island]) for decode in sorted(decodes, key=lambda one: one.load)]


POLICIES: Mapping[str, Policy] = MappingProxyType({"least_loaded": least_loaded})
