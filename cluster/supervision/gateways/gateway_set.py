"""The gateways of a running cluster: one on the launcher's host, or one on each host that fits."""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import NoRoom, RayAway, TandemError
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.peers.table import LASTING_CELLS, Column, GatewayTable, table_bytes
from tandem.cluster.processes.placement import Where
from tandem.cluster.processes.processes import Processes
from tandem.cluster.routing.membership import Membership
from tandem.cluster.supervision.gateway_supervisor import GatewayShape, GatewaySupervisor, TakeOrder
from tandem.cluster.supervision.gateways.host_share import HostCounts
from tandem.cluster.supervision.network import Network
from tandem.workers.ports.tls import bracketed

LOOK_SECONDS = 2.0  # between two looks at the list of hosts
JOIN_SECONDS = 10.0
AGAIN_SECONDS = 60.0  # until a host on which no gateway could be started is tried again
WILDCARDS = ("0.0.0.0", "::")
log = logging.getLogger(__name__)


class GatewaySet:
    """All gateways. Owned by the cluster. A host that joins later gets a gateway, and a host that leaves loses it.

    A gateway of the launcher's host that is lost too often ends the cluster. A gateway of another host starts again
    later.
    """

    def __init__(
        self,
        processes: Processes,
        settings: GatewaySettings,
        shape: GatewayShape,
        network: Network,
        membership: Membership,
        release: Callable[[str], None],
        orders: TakeOrder,
        failed: Callable[[TandemError], None],
        beside: Set[int] = frozenset(),
    ) -> None:
        """Takes the arguments of GatewaySupervisor. network: after the processes' start."""
        section = settings.config.gateway
        self._processes = processes
        security = settings.security
        if network.peers is not None and security.token_file is not None:
            # The token travels. Certificates name their hosts, and are read there.
            security = replace(security, api_key=security.token(), token_file=None)
        self._settings = replace(settings, peers=network.peers, security=security)
        self._shape = shape
        self._membership = membership
        self._release, self._take, self._failed = release, orders, failed
        self._beside = beside
        self._moves = network.peers is not None
        self._where = Where(not self._moves, section.node_resources, section.node_labels)
        self._here = ""  # the address of the launcher's host
        self._numbers = 0
        self._supervisors: dict[str, GatewaySupervisor] = {}  # by their hosts' addresses
        self._numbered: dict[str, int] = {}  # and the numbers of their gateways
        self._broken: dict[str, TandemError] = {}  # hosts whose gateways were lost too often
        self._retired: list[GatewaySupervisor] = []
        self._again: dict[str, float] = {}  # hosts without a gateway: when to try again
        self._counts = _Counts(shape.num_islands)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateways", daemon=True)

    def start(self) -> Sequence[GatewaySupervisor]:
        """Begins to start a gateway on each host that fits now. Each has `ready`. NoRoom without such a host."""
        (self._here,) = self._processes.hosts_for(Where(here=True))[:1]
        hosts = self._hosts() if self._moves else self._hosts()[:1]
        for address in sorted(hosts, key=lambda address: (address != self._here, address)):  # the launcher's own first
            self._add(address)
        if not self._supervisors:
            raise NoRoom(f"no host has what gateway.nodes asks for: {self._where}")
        return self.all

    def watch(self) -> None:
        """Lets gateways come and go with their hosts from now on. Call it once they serve."""
        if self._moves:
            self._thread.start()

    @property
    def all(self) -> list[GatewaySupervisor]:
        return list(self._supervisors.values())

    @property
    def addresses(self) -> list[GatewayAddresses]:
        """The addresses of running gateways, the launcher's host first. The host's own address stands in for a
        wildcard."""
        if not self._moves:
            return [one.addresses for one in self.all]
        return [_at(one.addresses, address) for address, one in self._supervisors.items()]

    @property
    def table(self) -> GatewayTable:
        """The counts of all processes together. Valid until the end."""
        return self._counts.table if self._moves else self.all[0].table

    def stop(self, grace: float, drain_seconds: float | None) -> None:
        """Ends all gateways. grace: see GatewaySupervisor. drain_seconds: see give_way(); None if no other gateway
        takes over."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)  # Ray may keep it waiting
        everyone = [*self.all, *self._retired]
        for one in everyone:
            one.grace = grace
            if drain_seconds is not None:
                one.give_way(drain_seconds)
            one.stop()
        for one in everyone:
            one.join()

    def _add(self, address: str) -> None:
        is_here = address == self._here
        settings = self._settings if is_here and not self._moves else self._settings_on(address, is_here)
        self._numbered[address] = self._numbers
        self._numbers += 1
        supervisor = GatewaySupervisor(
            self._processes,
            settings,
            self._shape,
            self._membership,
            self._release,
            self._take,
            settings.config.recovery,
            self._failed if is_here else partial(self._broken.__setitem__, address),
            self._beside,
            is_here=is_here,
        )
        self._supervisors[address] = supervisor
        supervisor.start()

    def _settings_on(self, address: str, is_here: bool) -> GatewaySettings:
        """Returns the settings with the values that differ from host to host."""
        settings, config = self._settings, self._settings.config
        if not is_here:
            gateway = config.gateway.model_copy(update={"host": _host_on(config.gateway.host, address)})
            metrics = config.metrics.model_copy(update={"host": _host_on(config.metrics.host, address)})
            config = config.model_copy(update={"gateway": gateway, "metrics": metrics})
        return replace(settings, config=config, number=self._numbers, node=address)

    def _hosts(self) -> Sequence[str]:
        return self._processes.hosts_for(self._where)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self._follow(self._hosts())
            except RayAway:
                pass  # this is reported elsewhere, and hosts neither come nor go until it is back
            except Exception as error:  # Ray's, for example: its loss is handled elsewhere
                log.warning("gateways cannot follow their hosts: %s: %s", type(error).__name__, error)
            self._counts.look({self._numbered[address]: one for address, one in self._supervisors.items()})

    def _follow(self, hosts: Sequence[str]) -> None:
        for address, one in list(self._supervisors.items()):
            error = self._broken.pop(address, None) or (one.ready.exception() if one.ready.done() else None)
            if address in hosts and error is None:
                continue
            log.warning("the gateway on %s is gone: %s", address, error or "its host is")
            self._again[address] = time.monotonic() + (AGAIN_SECONDS if error else 0.0)
            self._retired.append(self._supervisors.pop(address))
            one.retire()
        self._retired = [one for one in self._retired if one.is_alive]
        for address in hosts:
            if address not in self._supervisors and time.monotonic() >= self._again.get(address, 0.0):
                log.info("a gateway starts on %s", address)
                self._add(address)


class _Counts:
    """The counts of all hosts' processes, in a row as one host's processes have it. Owned by the set's thread."""

    def __init__(self, num_islands: int) -> None:
        self.table = GatewayTable(mmap.mmap(-1, table_bytes(1, num_islands)), 1, num_islands)
        self._asked: dict[int, Future[HostCounts]] = {}
        self._known: dict[int, HostCounts] = {}
        self._gone = np.zeros(LASTING_CELLS, np.int64)  # of gateways that are gone: no count goes down

    def look(self, gateways: dict[int, GatewaySupervisor]) -> None:
        """Takes the answers since the last call, and asks again. gateways: by their numbers."""
        for number, answer in list(self._asked.items()):
            if answer.done():
                if answer.exception() is None:
                    self._known[number] = answer.result()
                del self._asked[number]
        for number in self._known.keys() - gateways.keys():
            self._asked.pop(number, None)
            self._gone += self._known.pop(number).lasting
        for number, gateway in gateways.items():
            if number not in self._asked and (answer := gateway.counts()) is not None:
                self._asked[number] = answer
        lasting = np.frombuffer(self.table.lasting(0), np.int64)
        lasting[:] = sum((one.lasting for one in self._known.values()), self._gone)
        self.table.put(Column.QUEUED, sum(one.queued for one in self._known.values()))
        placed: Int64Array = np.zeros_like(self.table.placed)
        for one in self._known.values():
            np.add.at(placed, one.cells, one.tokens)
        self.table.put_far(placed)


def _host_on(host: str, address: str) -> str:
    """Returns the address on which a gateway of another host listens, derived from the launcher's own."""
    return host if host in WILDCARDS or is_loopback(host) else address


def _at(addresses: GatewayAddresses, node: str) -> GatewayAddresses:
    def named(address: str | None) -> str | None:
        host, _, port = (address or "").rpartition(":")
        return f"{bracketed(node)}:{port}" if host.strip("[]") in WILDCARDS else address

    return replace(
        addresses, grpc=named(addresses.grpc) or "", http=named(addresses.http), metrics=named(addresses.metrics)
    )
