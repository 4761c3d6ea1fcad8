"""A gateway in a cluster's process, with the methods that its supervisor calls. Nothing here imports torch."""

import threading
from concurrent.futures import Future

from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.frontends.orders import Order, Outcome
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.peers.hosts import GatewayHosts
from tandem.cluster.processes.garbage import IdleCollections
from tandem.cluster.processes.heap import keep_freed_memory
from tandem.cluster.routing.membership import IslandState, Outage
from tandem.cluster.scaling import ScalingState
from tandem.workers.event_loop import EventLoopThread
from tandem.workers.logs import close_log, open_log

LOST = "its launcher or its Ray was lost; the same request may succeed once it runs again"


class GatewayActor:
    """The gateway in a process of its own."""

    def __init__(self, settings: GatewaySettings) -> None:
        host = f"{settings.node}." if settings.peers is not None else ""
        name = f"{settings.config.name}/gateway.{host}{settings.process}"
        self._log = open_log(settings.config.logging.settings, name)
        self._stopped = threading.Event()
        keep_freed_memory()
        self._events = EventLoopThread("gateway")
        self._drain_seconds = settings.config.gateway.drain_seconds
        self._gateway = Gateway(settings)
        self._collecting = Future[None]()

    def serve(self, num_pages: int | None = None) -> GatewayAddresses:
        """Serves requests. num_pages: see Gateway.start()."""
        addresses = self._events.run(self._gateway.start(num_pages), timeout=30)
        self._gateway.prepare()
        self._collecting = self._events.start(IdleCollections(lambda: not self._gateway.running).run())
        return addresses

    def ping(self) -> None:
        self._events.run(self._gateway.ping(), timeout=30)

    def update_island(self, state: IslandState) -> None:
        self._events.run(self._gateway.update_island(state), timeout=30)

    def update_adapters(self, adapters: AdapterSet) -> None:
        self._events.run(self._gateway.update_adapters(adapters), timeout=30)

    def update_hosts(self, hosts: GatewayHosts) -> None:
        self._events.run(self._gateway.update_hosts(hosts), timeout=30)

    def update_scaling(self, state: ScalingState) -> None:
        self._events.run(self._gateway.update_scaling(state), timeout=30)

    def update_outage(self, outage: Outage) -> None:
        self._events.run(self._gateway.update_outage(outage), timeout=30)

    def placed_tokens(self, island: str) -> int:
        return self._events.run(self._gateway.placed_tokens(island), timeout=30)

    def unfinished(self, island: str, pes: frozenset[int], move: bool) -> int:
        return self._events.run(self._gateway.unfinished(island, pes, move=move), timeout=30)

    def next_order(self) -> Order | None:
        return self._events.run(self._gateway.next_order(), timeout=60)

    def answer_order(self, number: int, outcome: Outcome | BaseException) -> None:
        self._events.run(self._gateway.answer_order(number, outcome), timeout=30)

    def wait(self) -> None:
        self._stopped.wait()

    def drain(self) -> None:
        self._events.run(self._gateway.drain(), timeout=self._drain_seconds + 20)

    def abandon(self) -> None:
        """Ends all calls at once, with an error that names the loss. See WorkerActor.abandon."""
        self._events.run(self._gateway.stop(0.0, LOST), timeout=30)

    def stop(self, grace: float) -> None:
        self._collecting.cancel()
        self._events.run(self._gateway.stop(grace), timeout=grace + 20)
        self._events.stop()
        close_log(self._log)
        self._stopped.set()
