"""Requests at workers that are about to leave their island."""

from collections.abc import Collection

from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.routing.islands import Islands
from tandem.workers.config import Role


def unfinished(islands: Islands, requests: ActiveRequests, name: str, pes: Collection[int], *, move: bool) -> int:
    """Counts the requests of this process that still need these workers of an island. Runs on the gateway's event loop.

    move: their decoding requests go on at the island's other workers, spread evenly over decode workers that can be
    reached. A request whose prompt is still computed is not moved yet, and a sliding one never is.
    """
    leaving = [link for link in islands.workers(name) if link.pe in pes]
    if move:
        others = [link for link in islands.links().values() if link.key[0] == name and link.reachable]
        targets = [link for link in others if link.role == Role.DECODE] or others
        for source in leaving:
            share = -(-source.decoding // max(1, len(targets)))
            for target in sorted(targets, key=lambda link: link.load):
                requests.move(source, target, share, leaves=True)
    return sum(link.unfinished for link in leaving)
