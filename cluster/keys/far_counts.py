"""Counts of callers' keys on other hosts, for the limits of this one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_cells import WINDOW, KeyCells, Slot, Unit
from tandem.cluster.peers.key_counts import KeyCounts
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.table import GatewayTable

PERIOD_SECONDS = 0.1  # between two questions
PATIENCE_SECONDS = 1.0  # after which a host that does not answer holds the others up no more
IDLE = 9  # times as long as the event loop was held by the answers are at least left between two
SLICE = 250  # keys whose counts are told before other tasks of the event loop run
PARTS = 8  # of what is left of a limit, divided by the hosts: what one may spend between two questions
NO_LIMIT = 1 << 50


class _Heard(NamedTuple):
    """The last answer of a host, and when it came."""

    second: int
    counts: KeyCounts


class FarCounts:
    """Asks one process of each other host again and again, and tells all processes of this one.

    The first process of a host that is there does so, on its event loop. A host that does not answer counts as it last
    did, until that is a minute old.

    Hosts hear of each other a little late. So each spends a small part only of what is left until it hears again: the
    parts of all hosts never come to more than is left, up to one request of each.
    """

    def __init__(self, table: GatewayTable, links: PeerLinks, keys: Callable[[], Sequence[Key]]) -> None:
        """keys: of this host's file. Other keys' counts are ignored: their hosts have another file."""
        self._table = table
        self._links = links
        self._keys = keys
        self._cells = KeyCells(table, row=-1)
        self._hosts: dict[tuple[int, int], _Heard] = {}  # by the numbers of hosts and their tables
        self._all_heard = time.monotonic()  # when all hosts had answered
        self._before: _Heard | None = None  # what a process that did this before had heard

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            held = 0.0
            if not any(other < self._table.process for other in self._table.others()):
                held = await self.look()
            await asyncio.sleep(max(PERIOD_SECONDS, IDLE * held))

    async def look(self) -> float:
        """Asks all once, at the same time. Returns for how many seconds the answers have held the event loop. Other
        tasks run between two slices of the keys."""
        answers, now = await self._links.key_counts(), time.monotonic()
        if len(answers) == len(self._links.hosts):
            self._all_heard = now
        second = int(now)
        if self._before is None:
            self._before = _Heard(second, self._cells.own(second))
        for number, answer in answers:
            try:
                # A host that has lost its table begins anew: what it had counted before still counts here.
                counts = KeyCounts.from_proto(answer, len(Unit), WINDOW)
                self._hosts[number, counts.table] = _Heard(second, counts)
            except ValueError:
                continue  # of another version: it counts as it last did
        self._hosts = {host: one for host, one in self._hosts.items() if second - one.second < WINDOW}
        renews = now == self._all_heard or now - self._all_heard >= PATIENCE_SECONDS
        keys = sorted(self._keys(), key=lambda key: key.id)
        slots = self._cells.open({key.id for key in keys}, second)
        keys = [key for key in keys if key.id in slots]
        held = time.monotonic() - now
        for begin in range(0, len(keys), SLICE):
            await asyncio.sleep(0)
            began = time.monotonic()
            self._tell(keys[begin : begin + SLICE], slots, second, renews=renews)
            held += time.monotonic() - began
        return held

    def _tell(self, keys: Sequence[Key], slots: dict[int, Slot], second: int, *, renews: bool) -> None:
        """keys: ascending by id. renews: whether this host may spend another part of what is left."""
        ids = np.array([key.id for key in keys], np.int64)
        far = self._far(ids, second)
        used = far.sum(-1) + self._cells.all_used(ids, second)
        most = (np.array([_limits(key) for key in keys], np.int64).reshape(-1, len(Unit)) - used).clip(0)
        most //= PARTS * (1 + len(self._links.hosts))
        self._cells.put([slots[key.id] for key in keys], far, most if renews else None, second)

    def _far(self, ids: Int64Array, second: int) -> Int64Array:
        """Returns what other hosts have counted, [ids, 2, WINDOW]."""
        heard = [_found(_aged(one, second), ids) for one in self._hosts.values()]
        far = sum(heard, np.zeros((len(ids), len(Unit), WINDOW), np.int64))
        if self._before is not None and second - self._before.second < WINDOW:
            far = np.maximum(far, _found(_aged(self._before, second), ids))
        return far


def _limits(key: Key) -> list[int]:
    """Returns the requests and tokens a minute that a key may have, NO_LIMIT if it has no limit."""
    return [NO_LIMIT if one is None else one for one in (key.requests_per_minute, key.tokens_per_minute)]


def _found(counts: KeyCounts, ids: Int64Array) -> Int64Array:
    """Returns the windows of these ids, which ascend, [ids, 2, WINDOW]; 0 where the counts lack an id."""
    windows = np.zeros((len(ids), len(Unit), WINDOW), np.int64)
    _, ours, theirs = np.intersect1d(ids, counts.ids, assume_unique=True, return_indices=True)
    windows[ours] = counts.windows[theirs]
    return windows


def _aged(heard: _Heard, second: int) -> KeyCounts:
    """Returns the counts, moved by the time that has passed since."""
    late = min(WINDOW, second - heard.second)
    windows = np.zeros_like(heard.counts.windows)
    windows[..., late:] = heard.counts.windows[..., : WINDOW - late]
    return KeyCounts(heard.counts.ids, windows)
