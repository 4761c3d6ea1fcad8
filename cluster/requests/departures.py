"""Requests at workers that are about to leave their island."""

from collections.abc import Collection

from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.routing.islands import Islands
from tandem.workers.config import Role


class Departures:
    """Used on the gateway's event loop."""

    def __init__(self, islands: Islands, requests: ActiveRequests) -> None:
        self._islands = islands
        self._requests = requests

    def unfinished(self, name: str, pes: Collection[int], *, move: bool) -> int:
        """How many requests of this process still need these workers of an island.

        move: those that they decode go on at the others, spread evenly over decode workers that can be reached. A
        request whose prompt is still computed is not moved yet, one that slides never.
        """
        leaving = [link for link in self._islands.workers(name) if link.pe in pes]
        if move:
            others = [link for link in self._islands.links().values() if link.key[0] == name and link.reachable]
            targets = [link for link in others if link.role == Role.DECODE] or others
            for source in leaving:
                share = -(-source.decoding // max(1, len(targets)))
                for target in sorted(targets, key=lambda link: link.load):
                    self._requests.move(source, target, share, leaves=True)
        return sum(link.unfinished for link in leaving)
