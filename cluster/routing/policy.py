"""Routing policies: from the workers' loads to the order in which pairs of workers are asked for room.

A policy is a pure function with an entry in POLICIES; gateway.routing_policy names the one in use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tandem.workers.config import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE  # a name here is found many times faster than one in an enum
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
    parked: int = 0  # sequences that go on there once there is room
    token_seconds: float = 0.0  # from one decode step to the next
    prompt_rate: float = 0.0  # prompt tokens a second while it computes prompts
    prompt_rate_beside_rows: float = 0.0  # prompt tokens a second that its rows leave it; 0: unknown
    host: str = ""  # its address

    @property
    def key(self) -> Key:
        return self.island, self.pe

    def plus(self, tokens: int) -> "WorkerLoad":
        """Returns the load with so many tokens more to hold and to compute."""
        return self._replace(load=self.load + tokens, prompt_tokens=self.prompt_tokens + tokens)


NO_PUSHES: Mapping[tuple[str, str], float] = MappingProxyType({})
NO_MATCHES: Mapping[Key, int] = MappingProxyType({})


class Ask(NamedTuple):
    """The figures of a request by which policies choose."""

    prompt_tokens: int
    max_tokens: int
    matches: Mapping[Key, int] = NO_MATCHES  # prompt tokens whose KV a worker holds; 0 for all others
    pushes: Mapping[tuple[str, str], float] = NO_PUSHES  # seconds a token, from one host to another; 0 for all others

    def push_seconds(self, prefill: "WorkerLoad", decode: "WorkerLoad") -> float:
        """Returns the seconds that pushing the prompt between the two workers adds to it."""
        seconds = self.pushes.get((prefill.host, decode.host), 0.0)
        return seconds * max(0, self.prompt_tokens - self.matches.get(decode.key, 0))

    def push_tokens(self, prefill: "WorkerLoad", decode: "WorkerLoad") -> int:
        """Returns the number of prompt tokens that the prefill worker would compute in that time."""
        return int(self.push_seconds(prefill, decode) * prefill.prompt_rate)


class Pair(NamedTuple):
    """The workers that decode a request and compute its prompt: two workers of an island, or one for both."""

    decode: WorkerLoad
    prefill: WorkerLoad
    first_token_seconds: float = 0.0  # the policy's estimate; 0 if it has none


Policy = Callable[[Sequence[WorkerLoad], Ask, int], Iterator[Pair]]
"""Takes the loads, grouped by island, the request, and the number of choices made before. Best pair first.

A pair that is left out gets no request. The gateway tries the pairs in order until a decode worker has room.
"""


def least_loaded(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
    """Yields every reachable decode worker by load, each with the least loaded reachable prefill worker of its
    island."""
    if ask.pushes:
        return _by_hosts(workers, ask, lambda one: one.load, lambda one: one.load, weighs_prompts=False)
    best: dict[str, WorkerLoad] = {}
    for worker in workers:
        if worker.role is PREFILL and worker.reachable:
            rival = best.get(worker.island)
            if rival is None or worker.load < rival.load:
                best[worker.island] = worker
    decodes = [one for one in workers if one.role is DECODE and one.reachable and one.island in best]
    return (Pair(decode, best[decode.island]) for decode in sorted(decodes, key=lambda one: one.load))


def prefix_aware(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
    """Orders pairs like least_loaded, but subtracts the part of the prompt that a worker holds from its load.

    The load of a prefill worker is in tokens to compute before this prompt. A token that it need not compute counts
    SAVED_WORTH tokens: it saves the prompt's own time, and the time of all requests after it. The load of a decode
    worker is in tokens to hold, and a token that it holds already counts as one. So a match outweighs a bounded load. A
    prefix that everybody sends drowns no worker: another one comes to hold it, too.
    """
    held = ask.matches
    if ask.pushes:
        return _by_hosts(
            workers,
            ask,
            lambda one: one.prompt_tokens - SAVED_WORTH * held.get(one.key, 0),
            lambda one: one.load - held.get(one.key, 0),
        )
    best: dict[str, tuple[int, int, WorkerLoad]] = {}
    decodes: list[tuple[int, str, WorkerLoad]] = []
    for worker in workers:
        if not worker.reachable:
            continue
        island = worker.island
        match = held.get((island, worker.pe), 0) if held else 0
        if worker.role is DECODE:
            decodes.append((worker.load - match, island, worker))
            continue
        cost = worker.prompt_tokens - SAVED_WORTH * match
        rival = best.get(island)
        if rival is None or cost < rival[0] or (cost == rival[0] and worker.load < rival[1]):
            best[island] = cost, worker.load, worker
    ranked = [
        (cost + best[island][0], number, worker)
        for number, (cost, island, worker) in enumerate(decodes)
        if island in best
    ]
    ranked.sort()
    return (Pair(decode, best[decode.island][2]) for _, _, decode in ranked)


def _by_hosts(
    workers: Sequence[WorkerLoad],
    ask: Ask,
    prompt_cost: Callable[[WorkerLoad], int],
    row_cost: Callable[[WorkerLoad], int],
    *,
    weighs_prompts: bool = True,
) -> Iterator[Pair]:
    """Pairs each decode worker with its best prefill worker, where pushes between hosts take time.

    Costs are in tokens. weighs_prompts: what waits at the prefill worker counts in the order of decode workers, too.
    """
    prefills: dict[str, list[WorkerLoad]] = {}
    for one in workers:
        if one.role is PREFILL and one.reachable:
            prefills.setdefault(one.island, []).append(one)
    ranked: list[tuple[int, int, Pair]] = []
    for number, decode in enumerate(workers):
        if decode.role is not DECODE or not decode.reachable or decode.island not in prefills:
            continue
        costs = [
            (prompt_cost(one) + ask.push_tokens(one, decode), one.load, turn, one)
            for turn, one in enumerate(prefills[decode.island])
        ]
        cost, _, _, prefill = min(costs)
        counted = cost if weighs_prompts else ask.push_tokens(prefill, decode)
        ranked.append((row_cost(decode) + counted, number, Pair(decode, prefill)))
    ranked.sort(key=lambda one: one[:2])
    return (pair for _, _, pair in ranked)


POLICIES: Mapping[str, Policy] = MappingProxyType({"least_loaded": least_loaded, "prefix_aware": prefix_aware})
