"""Routing policies: from the workers' loads to the order in which pairs of workers are asked for room.

A policy is a pure function with an entry in POLICIES; gateway.routing_policy names the one in use.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tandem.workers.config import Role

SAVED_WORTH = 3  # see prefix_aware and docs/decisions/0066

Key = tuple[str, int]
"""A worker's island and its PE."""


class WorkerLoad(NamedTuple):
    """One worker that takes requests, as the gateway knows it. Measured figures are 0 before the first report."""

    island: str
    pe: int
    role: Role
    load: int  # tokens that the gateway's processes have placed there and not taken back
    reachable: bool  # False for a moment after a failed call
    prompt_tokens: int = 0  # of prompts that wait there, or run
    rows: int = 0  # sequences that it decodes
    token_seconds: float = 0.0  # from one decode step to the next
    prompt_rate: float = 0.0  # prompt tokens a second while it computes prompts

    @property
    def key(self) -> Key:
        return self.island, self.pe


NO_MATCHES: Mapping[Key, int] = MappingProxyType({})


class Ask(NamedTuple):
    """What a request asks for."""

    prompt_tokens: int
    max_tokens: int
    matches: Mapping[Key, int] = NO_MATCHES  # prompt tokens whose KV a worker holds; 0 for all others


class Pair(NamedTuple):
    """Where a request is decoded, and where its prompt is computed: two workers of an island, or one for both."""

    decode: WorkerLoad
    prefill: WorkerLoad
    first_token_seconds: float = 0.0  # what the policy expects; 0 where it expects nothing


Policy = Callable[[Sequence[WorkerLoad], Ask, int], list[Pair]]
"""Takes the loads, grouped by island, the request, and the number of choices made before. Best pair first.

A pair that is left out gets no request. The gateway tries the pairs in order until a decode worker has room.
"""


def least_loaded(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> list[Pair]:
    """Every reachable decode worker by load, each with the least loaded reachable prefill worker of its island."""
    best: dict[str, WorkerLoad] = {}
    for worker in workers:
        if worker.role == Role.PREFILL and worker.reachable:
            rival = best.get(worker.island)
            if rival is None or worker.load < rival.load:
                best[worker.island] = worker
    decodes = [one for one in workers if one.role == Role.DECODE and one.reachable and one.island in best]
    return [Pair(decode, best[decode.island]) for decode in sorted(decodes, key=lambda one: one.load)]


def prefix_aware(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> list[Pair]:
    """As least_loaded, but what a worker holds of the prompt counts against its load.

    The load of a prefill worker is in tokens to compute before this prompt. A token that it need not compute counts
    SAVED_WORTH of them: it saves its own time, and that of all requests behind it. The load of a decode worker is in
    tokens to hold, and one that it holds already counts as one. So a match outweighs a bounded load. A prefix that
    everybody sends drowns no worker: another one comes to hold it, too.
    """
    held, decode_role = ask.matches, Role.DECODE
    best: dict[str, tuple[int, int, WorkerLoad]] = {}
    decodes: list[WorkerLoad] = []
    for worker in workers:
        if not worker.reachable:
            continue
        if worker.role is decode_role:
            decodes.append(worker)
            continue
        cost = worker.prompt_tokens - SAVED_WORTH * held.get(worker[:2], 0) if held else worker.prompt_tokens
        rival = best.get(worker.island)
        if rival is None or cost < rival[0] or (cost == rival[0] and worker.load < rival[1]):
            best[worker.island] = cost, worker.load, worker
    ranked: list[tuple[int, int, WorkerLoad]] = []
    for number, worker in enumerate(decodes):
        prefill = best.get(worker.island)
        if prefill is not None:
            cost = worker.load - held.get(worker[:2], 0) if held else worker.load
            ranked.append((cost + prefill[0], number, worker))
    ranked.sort()
    return [Pair(decode, best[decode.island][2]) for _, _, decode in ranked]


POLICIES: Mapping[str, Policy] = MappingProxyType({"least_loaded": least_loaded, "prefix_aware": prefix_aware})
