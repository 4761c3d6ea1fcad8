"""A process of the gateway: tandem.v1.Inference over gRPC, with health and reflection, and the HTTP server beside it.

Processes of one gateway listen on the same ports. They share a table of counts (cluster/peers/table.py), and claim the
ids of requests from each other.
"""

import asyncio
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.cluster.adapters.values import AdapterSet
from tandem.cluster.errors import Unavailable
from tandem.cluster.frontends.account import ClusterAccount
from tandem.cluster.frontends.admin import Admin
from tandem.cluster.frontends.grpc_server import bind_port, grpc_server
from tandem.cluster.frontends.http.app import HttpApp
from tandem.cluster.frontends.http.monitoring import Monitoring
from tandem.cluster.frontends.inference import Inference
from tandem.cluster.frontends.model_info import model_info
from tandem.cluster.frontends.orders import Order, Orders, Outcome
from tandem.cluster.frontends.pages.page import DOCS_PAGE, STATUS_PAGE, pages
from tandem.cluster.frontends.pages.status import Status
from tandem.cluster.frontends.reflection import enable_reflection
from tandem.cluster.frontends.routes import ERROR_FORMS, OPERATORS, api_routes
from tandem.cluster.gateway.callers import Callers
from tandem.cluster.gateway.embedding import make_embeddings
from tandem.cluster.gateway.observers import observers_of, open_tracer
from tandem.cluster.gateway.served_adapters import ServedAdapters
from tandem.cluster.gateway.settings import READ_BY, GatewayAddresses, GatewaySettings
from tandem.cluster.metrics.request_metrics import RequestMetrics
from tandem.cluster.metrics.scrape import Scrape, Served
from tandem.cluster.peers.claims import Claims
from tandem.cluster.peers.far_placements import FarPlacements
from tandem.cluster.peers.hosts import GatewayHosts
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.peer_server import Abroad, PeerServer
from tandem.cluster.peers.table import Column, GatewayTable, open_table
from tandem.cluster.protocol import CLUSTER_ENDS
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import BodyBudget, largest_body
from tandem.cluster.requests.call_limit import CallLimit
from tandem.cluster.requests.default_sampling import default_sampling
from tandem.cluster.requests.departures import unfinished
from tandem.cluster.requests.observer import all_of
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.requests.rebalancer import Rebalancer
from tandem.cluster.requests.validation import RequestValidator
from tandem.cluster.requests.warm_up import WarmUp
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.membership import IslandState, Outage
from tandem.cluster.routing.policy import POLICIES
from tandem.cluster.routing.readiness import Readiness
from tandem.cluster.routing.router import Router
from tandem.cluster.scaling import ScalingState
from tandem.cluster.text.parsers.formats import OutputFormats
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tandem.workers.config import max_message_bytes
from tandem.workers.ports.call_turns import CallTurns

if TYPE_CHECKING:
    from tandem.cluster.frontends.http.server import HttpServer

LAST_SECONDS = 2.0  # at most, for clients to read why their calls ended
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class Gateway:
    """Validates, places, streams. Everything but the constructor runs on the event loop that answers the calls.

    It knows no island until update_island() tells it; until then requests queue.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        folder = Path(settings.config.model.path or "")
        self._model = settings.model
        self._tokenizer = Tokenizer.from_folder(folder)
        self._orders = Orders()
        self._adapters = ServedAdapters(settings, self._orders)
        self._names = self._adapters.names
        defaults = dict(default_sampling(folder, settings.config.model.generation_config))
        target = settings.config.scheduler.first_token_seconds
        if target is not None:
            defaults["first_token_seconds"] = target
        self._defaults = defaults
        self._colocated = settings.config.scheduler.roles == "colocated"
        self._started = settings.started or time.monotonic()
        self._table = GatewayTable.alone()
        if settings.table:
            self._table = open_table(
                settings.table, settings.processes, settings.num_islands, settings.process, settings.peer_token
            )
            self._table.clear(settings.process, settings.incarnation - 1)
        self._readers = Readers(folder, READ_BY)
        section = settings.config.gateway
        self._max_bytes = largest_body(section.max_message_mib, self._model.limits.max_model_len)
        self._bodies = BodyBudget((section.max_bodies_mib << 20) // settings.processes, self._max_bytes)
        self._warm_up: WarmUp | None = None

    async def start(self, num_pages: int | None = None) -> GatewayAddresses:
        """Opens the ports. num_pages: of each worker; None if the settings' model has them. Raises StartFailed if a
        port cannot be had."""
        settings, turns = self._settings, CallTurns()
        if num_pages is not None:
            self._model = self._model.with_pages(num_pages)
        self._make_routing()
        self._make_requests()
        await self._callers.start()
        self._start_tasks()
        await self._make_servers(turns)
        host, shared = settings.config.gateway.host, settings.shares_ports
        self._port, address = bind_port(self._server, turns, host, settings.port, shared=shared)
        http, monitor = [None if server is None else await server.start() for server in (self._http, self._monitor)]
        self._addresses = GatewayAddresses(address, http, monitor, "" if self._peers is None else self._peers.address)
        self._account.grpc_address, self._account.http_address = address, http or ""
        await self._tell_health()
        await self._server.start()
        await self._port.open(settings.security.tls("h2"))
        return self._addresses

    def _make_routing(self) -> None:
        """Makes the parts that place requests and ask other processes."""
        settings, section = self._settings, self._settings.config.gateway
        bound = settings.token_seconds
        policy = POLICIES[section.routing_policy] if bound is None else adaptive(bound, colocated=self._colocated)
        most, page_size = max_message_bytes(self._model.limits.max_model_len), settings.config.cache.page_size
        self._islands = Islands(most, policy, page_size, self._table, any_decodes=bound is not None)
        self._links = PeerLinks(self._table, settings.peer_token, settings.peers, settings.number)
        self._account = ClusterAccount(
            settings.config, self._islands, self._table, self._started, settings.node, self._links.gateways, self._names
        )
        self._queue = AdmissionQueue(
            section.max_queued,
            section.max_queued_tokens,
            self._table,
            self._links.give_way,
            priority_seconds=settings.config.scheduler.priority_seconds,
        )
        self._router = Router(
            self._islands,
            self._queue,
            id_prefix=settings.attempt_prefix,
            queue_seconds=section.queue_seconds,
            parks=settings.config.cache.parked_bytes is not None,
            check_adapter=self._names.check,
        )
        self._changes = self._adapters.route(self._islands)
        self._claims = Claims(self._table, self._links)
        self._readiness = Readiness(self._islands, adaptive=bound is not None)

    def _make_requests(self) -> None:
        """Makes the requests by id, and the observers of their ends."""
        section, security = self._settings.config.gateway, self._settings.security
        self._metrics = RequestMetrics(self._table)
        self._callers = Callers(self._settings, self._table, self._metrics, self._links)
        self._tracer, self._end_export = open_tracer(self._settings.config)
        observe = all_of(observers_of(self._settings.config, self._names.model[0], self._metrics, self._tracer))
        self._validator = RequestValidator(
            self._model.limits,
            self._tokenizer,
            salt_by_token=security.salt_by_token,
            defaults=self._defaults,
            names=self._names,
        )
        self._requests = ActiveRequests(
            self._validator,
            self._readers,
            self._router,
            self._tokenizer,
            self._model.eos_token_ids,
            self._table,
            self._claims,
            max_attempts=section.max_attempts,
            request_seconds=section.request_seconds,
            observe=observe,
            origin=self._settings.origin,
        )
        self._embeddings = make_embeddings(
            self._settings, self._model, self._islands, self._validator, self._tokenizer, self._readers, observe
        )

    def _start_tasks(self) -> None:
        """Starts the tasks that run beside the calls until stop()."""
        settings, bound = self._settings, self._settings.token_seconds
        if settings.warm_up and settings.process == 0:  # once is enough
            self._warm_up = WarmUp(self._islands, self._router, self._model.limits, local=bound is not None)
        self._tasks = [
            asyncio.create_task(one) for one in (self._metrics.run(), *self._adapters.tasks(), *self._callers.tasks())
        ]
        if settings.peers is not None and settings.process == 0:  # for all of this host
            self._tasks.append(asyncio.create_task(FarPlacements(self._table, self._links).run()))
        if bound is not None and not self._colocated:
            turn = partial(self._links.turn, settings.process, settings.processes)
            self._tasks.append(asyncio.create_task(Rebalancer(self._islands, self._requests, bound, turn).run()))

    async def _make_servers(self, turns: CallTurns) -> None:
        """Makes the servers with their services. Only the one for other processes opens its port here."""
        self._limit = CallLimit(self._settings.config.gateway.max_calls, self._table)
        scrape = self._scrape()
        adaptive = self._settings.token_seconds is not None
        self._admin = Admin(scrape, self._tracer, self._links, self._orders, self._changes, adaptive=adaptive)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # bound on import, unseen by pyright
        self._peers = await self._peer_server()
        self._server = self._grpc_server(turns)
        self._http, self._monitor = self._http_servers(scrape)

    def _scrape(self) -> Scrape | None:
        config = self._settings.config
        if not config.metrics.enabled:
            return None
        served = Served(
            self._names.model[0],
            config.cache.page_size,
            self._model.num_pages,
            config.cache.kv_cache_dtype,
            prefix_sharing=config.cache.prefix_sharing,
            adaptive=self._settings.token_seconds is not None,
        )
        return Scrape(
            self._metrics, served, self._account.info_here, lambda: self._readiness.reason, self._callers.book
        )

    async def _tell_health(self) -> None:
        """Tells gRPC's health: Inference and the whole server serve while requests would be served, Admin as long as
        this lives."""
        states = health_pb2.HealthCheckResponse
        ready = states.NOT_SERVING if self._readiness.reason else states.SERVING
        for service, state in (("", ready), (INFERENCE, ready), (ADMIN, states.SERVING)):
            await self._health.set(service, state)

    async def _peer_server(self) -> PeerServer | None:
        """Starts the server for other processes. The table names its socket before there is a request to ask for."""
        self._table.put(Column.PID, os.getpid())
        settings, requests, abroad = self._settings, self._requests, None
        if settings.peers is not None:
            gateways, placed = self._account.gateways_here, lambda: self._table.placed
            keys = None if self._callers.book is None else self._callers.book.counts
            abroad = Abroad(settings.node, settings.peers, requests.give_host, gateways, placed, keys)
        elif settings.processes == 1:
            return None
        peers = PeerServer(settings.peer_token, requests.give, self._queue.give_way, self._tracer.find, abroad)
        self._table.put(Column.SOCKET, await peers.start())
        return peers

    def _grpc_server(self, turns: CallTurns) -> grpc.aio.Server:
        """Makes the gRPC server with its services, without a port."""
        gate, rejected = self._callers.gate, self._metrics.rejected_grpc
        server = grpc_server(self._limit, self._bodies, gate, self._max_bytes, turns, rejected)
        model = model_info(self._names.model, self._model, self._tokenizer)
        cluster = self._account.info, self._account.info_for_keys
        inference = Inference(self._requests, self._embeddings, model, *cluster, rejected)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        enable_reflection([INFERENCE, ADMIN, health.SERVICE_NAME], server)
        return server

    def _http_servers(self, scrape: Scrape | None) -> "tuple[HttpServer | None, HttpServer | None]":
        """Makes the HTTP server for clients, and the one for monitors."""
        settings, section, metrics = self._settings, self._settings.config.gateway, self._settings.config.metrics
        if settings.http_port is None and settings.metrics_port is None:
            return None, None
        from tandem.cluster.frontends.http.server import HttpServer  # the extra http

        common = {"limit": self._limit, "gate": self._callers.gate, "rejected": self._metrics.rejected_http}
        load, on_http = partial(self._table.total, Column.ACTIVE), scrape if settings.metrics_port is None else None
        status = Status(self._account.info).serve
        watched = partial(Monitoring, lambda: self._readiness.reason, public=metrics.public, load=load, status=status)
        shared, http, monitor = settings.shares_ports, None, None
        if settings.http_port is not None:
            monitoring = watched(on_http, pages=pages(STATUS_PAGE, DOCS_PAGE, metrics=on_http is not None))
            routes = api_routes(
                self._requests,
                self._tokenizer,
                OutputFormats(self._tokenizer, section.tool_parser, section.reasoning_parser),
                names=self._names,
                root=settings.config.model.root,
                max_model_len=self._model.limits.longest,
                quantization=self._model.quantization,
                max_bytes=self._max_bytes,
                bodies=self._bodies,
                readers=self._readers,
                changes=self._changes,
                embeddings=self._embeddings,
                beside=monitoring.routes,
            )
            shapes = {"forms": ERROR_FORMS, "origins": section.cors_origins, "operators": OPERATORS}
            app = HttpApp(routes, monitoring, **shapes, **common)
            http = HttpServer(app, section.host, settings.http_port, settings.security, shared=shared)
        if settings.metrics_port is not None:
            app, key = HttpApp({}, watched(scrape, pages=pages(STATUS_PAGE, metrics=True)), **common), "metrics.port"
            monitor = HttpServer(app, metrics.host, settings.metrics_port, settings.security, shared=shared, key=key)
        return http, monitor

    async def drain(self) -> None:
        """Says that it is not ready, and serves on for gateway.drain_seconds. Returns at once if it was not ready
        before."""
        was_ready = not self._readiness.reason
        self._readiness.drain()
        await self._tell_health()
        if was_ready:
            await asyncio.sleep(self._settings.config.gateway.drain_seconds)

    async def stop(self, grace: float, why: str = "it was stopped") -> None:
        """Takes no new calls. Calls under way have `grace` seconds, then they end with an error. why: the reason, in
        words."""
        self._readiness.drain()
        self._orders.close()
        await self._health.enter_graceful_shutdown()
        self._port.close()
        http = [server for server in (self._http, self._monitor) if server is not None]
        ends = [asyncio.ensure_future(server.stop(grace + LAST_SECONDS)) for server in (self._server, *http)]
        await asyncio.wait(ends, timeout=grace)
        for running in (self._requests, self._embeddings):
            running.end(Unavailable(f"{CLUSTER_ENDS}{why}"))
        await asyncio.gather(*ends)
        self._port.release()
        for task in self._tasks:
            task.cancel()
        await self._changes.close()
        await self._router.close()
        await self._islands.close()
        self._claims.close()
        await self._links.close()
        await self._readers.close()
        await asyncio.to_thread(self._end_export)
        if self._peers is not None:
            await self._peers.stop()

    @property
    def running(self) -> int:
        """Returns how many requests are placed or wait for room in this process."""
        return self._requests.running

    def prepare(self) -> None:
        """Starts what the first long request would wait for. Returns at once."""
        self._readers.prepare()

    async def ping(self) -> None:
        """Returns when the event loop comes to it."""

    async def update_island(self, state: IslandState) -> None:
        """Takes the island's state from its supervisor. New workers serve at once, and are warm when this returns."""
        has_new = await self._islands.update(state)
        self._router.look_again()
        if has_new:
            await self._adapters.bring()
        if self._warm_up is not None and has_new:
            await self._warm_up.run(state.name)
        if state.workers:
            self._readiness.start()
        await self._tell_health()

    async def update_adapters(self, adapters: AdapterSet) -> None:
        """Serves these LoRA adapters from now on."""
        self._adapters.update(adapters)
        self._router.look_again()

    async def update_hosts(self, hosts: GatewayHosts) -> None:
        """Takes the hosts that have gateways."""
        self._links.update_hosts(hosts)

    async def update_scaling(self, state: ScalingState) -> None:
        """Takes the state of the scaling policy, for GetClusterInfo."""
        self._account.scaling = inference_pb2.ScalingInfo(**asdict(state))

    async def update_outage(self, outage: Outage) -> None:
        """Takes the reason why nothing can be started now. Ignores an older version."""
        if outage.version > self._account.outage.version:
            self._account.outage = outage

    async def placed_tokens(self, island: str) -> int:
        """Returns the tokens of this process's requests that the island's workers have not yet ended."""
        return self._islands.placed_tokens(island)

    async def unfinished(self, island: str, pes: frozenset[int], *, move: bool) -> int:
        """See unfinished()."""
        return unfinished(self._islands, self._requests, island, pes, move=move)

    async def next_order(self) -> Order | None:
        """Returns the next order; see Orders.next."""
        return await self._orders.next()

    async def answer_order(self, number: int, outcome: Outcome | BaseException) -> None:
        """Answers an order; see Orders.answer."""
        self._orders.answer(number, outcome)
