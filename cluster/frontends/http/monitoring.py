"""The HTTP routes that monitors ask for: /health, /ready, /ping, /load, /metrics, and what they are given beside."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.metrics.scrape import CONTENT_TYPE, Scrape

HEALTH = "/health"
READY = "/ready"
PING = "/ping"  # as SageMaker asks
METRICS = "/metrics"
LOAD = "/load"
STATUS = "/status"
READS = ("GET", "HEAD")
Handler = Callable[[Scope, Receive, Reply], Awaitable[None]]


class Monitoring:
    """Answers them however many calls are under way. Load balancers ask for the first three without a token."""

    def __init__(
        self,
        unready: Callable[[], str],
        scrape: Scrape | None,
        *,
        public: bool,
        load: Callable[[], int] | None = None,
        status: Handler | None = None,
        pages: Mapping[str, Handler] = MappingProxyType({}),
    ) -> None:
        """unready: see Readiness.reason. scrape: None serves no /metrics. public: /metrics needs no token. load:
        requests that run or wait; None serves no /load. status: answers /status. pages: by their paths; anybody may
        have them, so they say nothing of the cluster."""
        self._unready = unready
        self._scrape = scrape
        self._load = load
        self.routes = {
            HEALTH: (READS, self._health),
            READY: (READS, self._ready),
            PING: ((*READS, "POST"), self._health),
        }
        if scrape is not None:
            self.routes[METRICS] = (READS, self._metrics)
        if load is not None:
            self.routes[LOAD] = (READS, self._count)
        if status is not None:
            self.routes[STATUS] = (READS, status)
        self.routes |= {path: (READS, page) for path, page in pages.items()}
        self.open = {HEALTH, READY, PING, *pages, *((METRICS,) if public else ())}

    async def _health(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers that the gateway lives: its event loop has come to this."""
        await reply.whole(200, {"status": "ok"})

    async def _ready(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        reason = self._unready()
        if reason:
            await reply.whole(503, {"status": "not ready", "reason": reason})
        else:
            await reply.whole(200, {"status": "ready"})

    async def _count(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        assert self._load is not None, "there is such a route"
        await reply.whole(200, {"server_load": self._load()})

    async def _metrics(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        assert self._scrape is not None, "there is such a route"
        await reply.content(200, await self._scrape.text(), CONTENT_TYPE)
