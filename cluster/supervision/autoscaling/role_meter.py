"""Measures the recent load of islands' roles by what gateways have placed on workers. It asks no process."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.supervision.autoscaling.role_policy import RoleLoad
from tandem.cluster.supervision.autoscaling.scaling_policy import Load
from tandem.workers.config import Role


@dataclass(frozen=True)
class _Seen:
    """The work of both roles at one time."""

    queued: float = 0.0  # requests that wait for room
    prompts: float = 0.0  # tokens of prompts that prefill workers have yet to compute
    busy: float = 0.0  # the fraction of prefill workers that have such tokens
    placed: float = 0.0  # tokens on decode workers, whose prompts are computed or not


class RoleMeter:
    """Means over a window of looks. Not for several threads."""

    def __init__(self, table: GatewayTable, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """seconds: length of the window."""
        self._table = table
        self._seconds = seconds
        self._clock = clock
        self._seen: deque[tuple[float, _Seen]] = deque()

    def restart(self) -> None:
        """Forgets what was seen before."""
        self._seen.clear()

    def read(self, load: Load, islands: Sequence[IslandState], positions: int) -> RoleLoad:
        """Looks once more. load: of the same window. positions: those that a decode worker holds."""
        now = self._clock()
        self._seen.append((now, self._look(islands)))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._seconds:
            self._seen.popleft()
        columns = zip(*(astuple(seen) for _, seen in self._seen), strict=True)
        mean = _Seen(*(sum(column) / len(self._seen) for column in columns))
        prompt_rate = max(0.0, load.tokens_per_second - load.output_tokens_per_second)
        room = positions * sum(worker.role is Role.DECODE for island in islands for worker in island.workers)
        return RoleLoad(
            queue_seconds=_waits(mean.queued, load.placements_per_second),
            prefill_seconds=_waits(mean.prompts, prompt_rate),
            first_token_seconds=load.first_token_seconds,
            token_seconds=load.token_seconds,
            prompt_tokens_per_second=prompt_rate,
            output_tokens_per_second=load.output_tokens_per_second,
            prefill_use=mean.busy,
            decode_use=min(1.0, mean.placed / room) if room else 0.0,
            backlog=min(1.0, mean.prompts / mean.placed) if mean.placed else 0.0,
        )

    def _look(self, islands: Sequence[IslandState]) -> _Seen:
        cells, first = self._table.placed_everywhere, self._table.placed_columns(0, 0)[0]
        prompts, placed = list[int](), 0
        for island in islands:
            for worker in island.workers:
                tokens, waiting = (column - first for column in self._table.placed_columns(island.number, worker.pe))
                if worker.role is Role.PREFILL:
                    prompts.append(int(cells[waiting]))
                else:
                    placed += int(cells[tokens])
        busy = sum(waiting > 0 for waiting in prompts) / len(prompts) if prompts else 0.0
        return _Seen(self._table.total(Column.QUEUED), max(0, sum(prompts)), busy, max(0, placed))


def _waits(there: float, per_second: float) -> float:
    """Returns how long a request stays, by Little's law; inf if none leaves, because there is no pace to tell by."""
    return 0.0 if not there else there / per_second if per_second else math.inf
