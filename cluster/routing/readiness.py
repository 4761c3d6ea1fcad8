"""Tells whether requests would be served now, apart from whether the gateway lives."""

from tandem.cluster.routing.islands import Islands
from tandem.workers.config import Role


class Readiness:
    """The gateway's readiness. Owned by its event loop.

    A gateway is not ready while it starts, while no island can serve, and after it was told to stop. It still takes
    requests then, so that balancers have time to send theirs elsewhere.
    """

    def __init__(self, islands: Islands, *, adaptive: bool) -> None:
        """adaptive: whether any worker may compute prompts and decode."""
        self._islands = islands
        self._adaptive = adaptive
        self._started = False
        self._draining = False

    @property
    def reason(self) -> str:
        """The reason why the gateway is not ready; empty if it is."""
        if self._draining:
            return "the gateway is draining: it is about to stop"
        if not self._started:
            return "the gateway is starting: its first workers are not warm yet"
        if not self._serves():
            needed = "a worker" if self._adaptive else "a prefill and a decode worker"
            return f"no island has {needed}: it is being started again"
        return ""

    def start(self) -> None:
        """Marks the first workers as warm."""
        self._started = True

    def drain(self) -> None:
        """Marks the gateway as stopping."""
        self._draining = True

    def _serves(self) -> bool:
        roles: dict[str, set[Role]] = {}
        for (island, _), link in self._islands.links().items():
            roles.setdefault(island, set()).add(link.role)
        needed = set() if self._adaptive else {Role.PREFILL, Role.DECODE}
        return any(there >= needed for there in roles.values())
