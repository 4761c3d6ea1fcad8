"""Chooses decoding requests that should go on elsewhere: a pure function of the workers' loads."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tandem.cluster.routing.policy import WorkerLoad

FASTER = 0.7  # the target's token time, of the source's, at most
ROWS_A_MOVE = 8  # this fraction of the source's rows moves at a time: one in so many
MOST_A_MOVE = 8


class Move(NamedTuple):
    """Some requests that `source` decodes go on at `target`, of the same island."""

    source: WorkerLoad
    target: WorkerLoad
    num_requests: int


def moves(workers: Sequence[WorkerLoad], token_seconds: float) -> list[Move]:
    """Returns at most one move for each island whose slowest decoder takes longer than token_seconds for a token.

    Requests go to a worker that decodes much faster, or that has nothing to do.
    """
    islands: defaultdict[str, list[WorkerLoad]] = defaultdict(list)
    for worker in workers:
        if worker.reachable:
            islands[worker.island].append(worker)
    found = []
    for members in islands.values():
        source = max(members, key=_token_seconds)
        target = min(members, key=lambda one: (one.prompt_tokens > 0, _token_seconds(one)))
        slow = source.rows > 1 and source.token_seconds > token_seconds
        if slow and not target.prompt_tokens and _token_seconds(target) <= FASTER * source.token_seconds:
            found.append(Move(source, target, min(MOST_A_MOVE, -(-source.rows // ROWS_A_MOVE))))
    return found


def _token_seconds(worker: WorkerLoad) -> float:
    return worker.token_seconds if worker.rows else 0.0
