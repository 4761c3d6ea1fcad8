"""The seconds that pushes between two hosts add to a prompt, as a gateway process has seen them."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tandem.cluster.routing.policy import NO_PUSHES

Hosts = tuple[str, str]
"""The prefill worker's host, then the decode worker's."""

KEEP = 0.9  # of earlier figures, with each push
HALF_SECONDS = 60.0  # until an old figure counts half, so that a slow link is tried again
FRESH_SECONDS = 1.0  # for which per_token stays as it is
MOST_PAIRS = 1024


class PushTimes:
    """Measures pushes. Owned by the gateway's event loop. Workers that share a host push through its memory, which
    counts as 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._seen: dict[Hosts, tuple[float, float, float]] = {}  # seconds and tokens, fading; and when it was
        self._known: Mapping[Hosts, float] = NO_PUSHES
        self._known_at = clock()

    def saw(self, hosts: Hosts, tokens: int, seconds: float) -> None:
        """Records a push of so many tokens, which took the prompt so much longer."""
        if hosts[0] == hosts[1] or tokens < 1:
            return
        if hosts not in self._seen and len(self._seen) >= MOST_PAIRS:
            del self._seen[next(iter(self._seen))]  # hosts come and go
        before, counted, _ = self._seen.get(hosts, (0.0, 0.0, 0.0))
        self._seen[hosts] = KEEP * before + seconds, KEEP * counted + tokens, self._clock()

    @property
    def per_token(self) -> Mapping[Hosts, float]:
        """Returns the seconds a token for pairs of different hosts that were seen. Other pairs count as 0, and so are
        tried."""
        now = self._clock()
        if self._seen and now - self._known_at >= FRESH_SECONDS:
            self._known_at = now
            self._known = MappingProxyType({
                hosts: seconds / tokens * 0.5 ** ((now - when) / HALF_SECONDS)
                for hosts, (seconds, tokens, when) in self._seen.items()
            })  # fmt: skip
        return self._known
