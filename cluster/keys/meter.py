"""Counts one key's requests and tokens, and refuses what goes over its limits."""

import math
import time
from collections.abc import Callable, Sequence

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import RateLimited
from tandem.cluster.errors.limit_state import LimitState
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_cells import WINDOW, KeyCells, Slot, Sum, Unit

UNITS: dict[Unit, tuple[str, Sum]] = {
    Unit.REQUESTS: ("requests", Sum.REFUSED_REQUESTS),
    Unit.TOKENS: ("tokens", Sum.REFUSED_TOKENS),
}


class Paced(RateLimited):
    """A limit is not used up, but this host has to hear what others have spent. That takes a part of a second."""


class Meter:
    """Counts for one key in one gateway process. Owned by its event loop.

    A request counts first, then the meter looks at what all processes have counted. If that is too much, it takes the
    request back. So of two processes that admit at a time one sees the other, and they never admit too much. Another
    host's counts are a part of a second old.
    """

    def __init__(self, cells: KeyCells, slot: Slot, clock: Callable[[], float] = time.monotonic) -> None:
        self._cells = cells
        self._slot = slot
        self._clock = clock

    def look(self, key: Key) -> None:
        """Raises RateLimited if a limit of the key is used up, so that no request can pass."""
        self._check(key, (1, 1), own=False)

    def count(self, key: Key, tokens: int) -> "Charge":
        """Counts a request and its tokens. Raises RateLimited if it goes over a limit, Paced if this host must hear of
        others first; then it counts nothing."""
        self._check(key, (1, tokens), own=False)
        if _limits(key) != (None, None) and self._cells.is_paced(self._slot.id, (1, tokens), int(self._clock())):
            said = f"the key {key.name!r} has used much of its limits on this host; try again in 1 s"
            raise Paced(said, 1.0, self.states(key))
        charge = Charge(self, int(self._clock()), tokens)
        try:
            self._check(key, (1, tokens), own=True)
        except RateLimited:
            charge.cancel()
            raise
        self.sum(Sum.REQUESTS)
        self.sum(Sum.TOKENS, tokens)
        return charge

    def sum(self, one: Sum, amount: int = 1) -> None:
        """Adds to the sums that metrics report."""
        self._cells.sum(self._slot, one, amount)

    def add(self, unit: Unit, amount: int, second: int | None = None) -> None:
        """Counts without a look at limits. second: None is the present one."""
        self._cells.add(self._slot, unit, amount, int(self._clock()) if second is None else second)

    def take_back(self, unit: Unit, amount: int, second: int) -> None:
        self._cells.take_back(self._slot, unit, amount, second)

    def used_tokens(self) -> int:
        """The tokens used in the last minute, over all processes and hosts."""
        return self._cells.used(self._slot.id, int(self._clock()))[Unit.TOKENS]

    def states(self, key: Key) -> tuple[LimitState, ...]:
        """Returns how much is left of each limit that the key has."""
        now = self._clock()
        return _states(_limits(key), self._cells.window(self._slot.id, int(now)), now)

    def _check(self, key: Key, asked: tuple[int, int], *, own: bool) -> None:
        """asked: requests and tokens. own: they are counted already."""
        limits = _limits(key)
        if limits == (None, None):
            return
        now = self._clock()
        used = self._cells.used(self._slot.id, int(now))
        before = [count - amount if own else count for count, amount in zip(used, asked, strict=True)]
        over = [
            unit
            for unit, limit in zip(Unit, limits, strict=True)
            if limit is not None and before[unit] + asked[unit] > limit
        ]
        if not over:
            return
        window = self._cells.window(self._slot.id, int(now))
        if own:
            window[:, 0] -= asked
        for unit in over:
            self.sum(UNITS[unit][1])
        waits = [_wait(window[unit], before[unit] + asked[unit] - (limits[unit] or 0), now) for unit in over]
        raise _refusal(key, over[waits.index(max(waits))], before, asked, max(waits), _states(limits, window, now))


class Charge:
    """The count of one request. It is settled once, at the request's end."""

    def __init__(self, meter: Meter, second: int, tokens: int) -> None:
        self._meter = meter
        self._second = second
        self._tokens = tokens
        self._open = True
        meter.add(Unit.REQUESTS, 1, second)
        meter.add(Unit.TOKENS, tokens, second)

    def grow(self, tokens: int) -> None:
        """Counts the tokens to which the request has grown, beyond those already counted."""
        if self._open and tokens > self._tokens:
            self._meter.add(Unit.TOKENS, tokens - self._tokens)
            self._tokens = tokens

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Ends the count with the tokens that the request had. What it counted beyond that is taken back from the
        second in which it began. Idempotent."""
        if not self._open:
            return
        self.grow(prompt_tokens + output_tokens)
        self._open = False
        self._meter.take_back(Unit.TOKENS, self._tokens - prompt_tokens - output_tokens, self._second)
        self._meter.sum(Sum.PROMPT_TOKENS, prompt_tokens)
        self._meter.sum(Sum.OUTPUT_TOKENS, output_tokens)

    def cancel(self) -> None:
        """Takes back the count of a request that has not begun. Idempotent."""
        if self._open:
            self._open = False
            self._meter.take_back(Unit.TOKENS, self._tokens, self._second)
            self._meter.take_back(Unit.REQUESTS, 1, self._second)


def _limits(key: Key) -> tuple[int | None, int | None]:
    return key.requests_per_minute, key.tokens_per_minute


def _wait(counts: Int64Array, too_many: int, now: float) -> float:
    """Returns the seconds, at least 1, until `too_many` of a unit have left the window. counts: [WINDOW]."""
    freed = counts[::-1].cumsum()
    oldest = int((freed < too_many).argmin())  # how many of the oldest seconds are not enough
    age = WINDOW - 1 - oldest
    return max(1.0, int(now) - age + WINDOW - now)


def _states(limits: Sequence[int | None], window: Int64Array, now: float) -> tuple[LimitState, ...]:
    states: list[LimitState] = []
    for unit, limit in zip(Unit, limits, strict=True):
        if limit is not None:
            counted = window[unit].nonzero()[0]
            reset = int(now) - int(counted[0]) + WINDOW - now if len(counted) else 0.0
            name = "requests" if unit == Unit.REQUESTS else "tokens"
            states.append(LimitState(name, limit, max(0, limit - int(window[unit].sum())), reset))
    return tuple(states)


def _refusal(
    key: Key,
    unit: Unit,
    used: Sequence[int],
    asked: Sequence[int],
    seconds: float,
    states: tuple[LimitState, ...],
) -> RateLimited:
    name, limit = UNITS[unit][0], _limits(key)[unit]
    needs = f", and this request needs {asked[unit]}" if unit == Unit.TOKENS else ""
    said = f"the key {key.name!r} has used {used[unit]} of its {limit} {name} a minute{needs}"
    return RateLimited(f"{said}; try again in {math.ceil(seconds)} s", float(math.ceil(seconds)), states)
