"""Gateways on several hosts: what is started where, who is told, and what comes of a loss. With scripted processes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import NoRoom, TandemError
from tandem.cluster.gateway.settings import GatewayAddresses
from tandem.cluster.peers.hosts import GatewayHosts
from tandem.cluster.peers.table import LASTING_CELLS, Column
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.routing.membership import Membership
from tandem.cluster.supervision.gateway_supervisor import GatewayShape
from tandem.cluster.supervision.gateways import gateway_set
from tandem.cluster.supervision.gateways.gateway_set import GatewaySet
from tandem.cluster.supervision.gateways.host_share import HostCounts, Shared
from tandem.cluster.supervision.network import Network
from tandem.cluster.supervision.process_settings import gateway_settings
from tests.cluster.fake_processes import FakeGroup, FakeProcess, FakeProcesses
from tests.support.gateways import NO_MODEL, known
from tests.support.waiting import until

HERE, FAR = "10.0.0.1", "10.0.0.2"
SHARED = Shared("/proc/1/fd/3", 50051, None, None)
TOKEN = "0123456789abcdef"
PLACED = 2  # the tokens of PE 1, as GatewayTable.placed has them
COUNTS = HostCounts(3, np.full(LASTING_CELLS, 2), np.array([PLACED]), np.array([700]))


def answer(method: str) -> Any:
    return {"shared": SHARED, "counts": COUNTS}.get(method)


class FakeHosts(FakeProcesses):
    """Hosts that come and go. started: on which one each process was."""

    def __init__(self) -> None:
        super().__init__(answers=answer)
        self.there = [FAR, HERE]
        self.started: dict[str, str] = {}

    @property
    def hosts(self) -> Sequence[str]:
        return list(self.there)

    def hosts_for(self, where: Where) -> Sequence[str]:
        fitting = [one for one in self.there if where.address in ("", one) and (one == HERE or not where.here)]
        return [one for one in fitting if where.labels in ({}, {"host": one})]

    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE) -> FakeGroup:
        hosts = self.hosts_for(where)
        if not hosts:
            raise NoRoom(f"no node with {where}")
        (host,) = hosts
        self.started |= {spec.name: host for spec in specs}
        group = super().start_group(specs, gpus=gpus, threads=threads, where=where)
        group.keeps_places = True
        return group

    def named(self, part: str) -> list[FakeProcess]:
        """Returns the living processes whose names have that part."""
        members = [member for group in self.groups for member in group.members]
        return [member for member in members if part in member.name and not member.killed]

    def settings(self, part: str) -> list[Any]:
        return [spec.argument for specs in self.specs for spec in specs if part in spec.name]


class SupervisedGateways:
    def __init__(self, folder: Path, **settings: Any) -> None:
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        values = {
            "name": "c",
            "model.path": ".",
            "gateway.nodes": "all",
            "gateway.port": 0,
            "security.token_file": str(token),
            "security.tls_at_proxy": True,
            "recovery.max_restarts": 2,
            **settings,
        }
        config = load_config(None, values)
        self.processes = FakeHosts()
        self.membership = Membership()
        self.released: list[str] = []
        self.failure: Future[TandemError] = Future()
        self.set = GatewaySet(
            self.processes,
            gateway_settings(config, NO_MODEL),
            GatewayShape(processes=2, num_islands=1, num_pages=known(16)),
            Network(config, self.processes),
            self.membership,
            self.released.append,
            lambda order: Future(),
            self.failure.set_result,
        )

    def start(self) -> None:
        for one in self.set.start():
            one.ready.result(30)
        self.set.watch()

    def hosts_told(self, process: FakeProcess) -> dict[str, int]:
        """Returns the number of processes on each host that the process was told of last."""
        told: list[Any] = [arguments[0] for method, arguments in process.calls if method == "update_hosts"]
        latest: GatewayHosts = max(told, key=lambda hosts: hosts.version)
        return {host.address: len(host.peers) for host in latest.hosts}


@pytest.fixture
def gateways(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SupervisedGateways]:
    """Runs gateways with the settings of the parameter."""
    monkeypatch.setattr(gateway_set, "LOOK_SECONDS", 0.05)
    serve = FakeProcess._answer
    monkeypatch.setattr(
        FakeProcess,
        "_answer",
        lambda self, method: GatewayAddresses("a:1", peer="a:2") if method == "serve" else serve(self, method),
    )
    made = SupervisedGateways(tmp_path, **getattr(request, "param", {}))
    yield made
    made.set.stop(1.0, None)
    assert all(member.killed for group in made.processes.groups for member in group.members)


def test_each_host_has_a_gateway_of_its_own(gateways: SupervisedGateways) -> None:
    gateways.start()
    processes = gateways.processes
    names = ["c/gateway.0.1", "c/gateway.1.1", "c/gateway.1-0.1", "c/gateway.1-1.1", "c/gateway.1-share.1"]
    assert processes.started == dict(zip(names, [HERE, HERE, FAR, FAR, FAR], strict=True))
    here, far = processes.settings("gateway.0.1")[0], processes.settings("gateway.1-0.1")[0]
    assert far.config.gateway.host == here.config.gateway.host == "127.0.0.1"
    assert (far.table, far.port) == (SHARED.table, SHARED.port)
    assert (here.node, far.node) == (HERE, FAR)
    assert here.peers == far.peers is not None
    assert here.peer_token == far.peer_token != ""
    assert (far.security.token(), far.security.token_file) == (TOKEN, None)
    assert len({here.origin, far.origin}) == len({here.attempt_prefix, far.attempt_prefix}) == 2
    assert TOKEN not in repr(far)
    assert "PRIVATE KEY" not in repr(far)
    for process in (*processes.named("gateway.0"), *processes.named("gateway.1-1")):
        until(lambda process=process: gateways.hosts_told(process) == {HERE: 2, FAR: 2})


@pytest.mark.parametrize(
    "gateways",
    [{"gateway.node_labels": {"host": FAR}, "gateway.host": HERE, "metrics.port": 0, "metrics.host": "::"}],
    indirect=True,
)
def test_a_gateway_listens_on_its_own_hosts_address(gateways: SupervisedGateways) -> None:
    gateways.start()
    owner = next(spec for specs in gateways.processes.specs for spec in specs if "share" in spec.name)
    (order,) = (spec.argument for spec in (owner,))
    assert order.host == FAR  # type: ignore[attr-defined]
    assert order.metrics == ("::", 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("gateways", [{"gateway.node_labels": {"host": FAR}}], indirect=True)
def test_labels_choose_the_hosts(gateways: SupervisedGateways) -> None:
    gateways.start()
    assert set(gateways.processes.started.values()) == {FAR}


@pytest.mark.parametrize("gateways", [{"gateway.nodes": "launcher"}], indirect=True)
def test_by_default_only_the_launchers_host_has_one(gateways: SupervisedGateways) -> None:
    gateways.start()
    assert set(gateways.processes.started.values()) == {HERE}
    assert [one.peers for one in gateways.processes.settings("gateway.")] == [None, None]


def test_a_lost_process_of_another_host_is_started_again_alone(gateways: SupervisedGateways) -> None:
    gateways.start()
    processes = gateways.processes
    (lost,) = processes.named("gateway.1-0.1")
    (owner,) = processes.named("share")
    lost.kill()
    until(lambda: processes.named("gateway.1-0.2"))
    assert gateways.released == ["1-0.1."]
    assert ("clear", (0, 1)) in owner.calls
    assert processes.named("gateway.1-1.1")
    assert not owner.killed


def test_what_a_lost_host_ran_is_released_and_starts_again_with_it(gateways: SupervisedGateways) -> None:
    gateways.start()
    processes, (watching, _) = gateways.processes, gateways.processes.named("gateway.0.1") * 2
    processes.there.remove(FAR)
    for process in processes.named("gateway.1-"):
        process.kill()
    until(lambda: sorted(gateways.released) == ["1-0.1.", "1-1.1."])
    until(lambda: gateways.hosts_told(watching) == {HERE: 2})
    until(lambda: not [one for one in gateways.set.all if one.addresses.grpc and one._settings.node == FAR])
    processes.there.append(FAR)
    until(lambda: gateways.hosts_told(watching) == {HERE: 2, FAR: 2})
    assert processes.named("gateway.2-0.1")
    assert not gateways.failure.done()


def test_a_host_that_loses_its_gateway_too_often_is_tried_again_and_the_others_serve_on(
    gateways: SupervisedGateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_set, "AGAIN_SECONDS", 0.1)
    gateways.start()
    processes = gateways.processes
    for incarnation in range(1, 4):
        until(lambda incarnation=incarnation: processes.named(f"gateway.1-0.{incarnation}"))
        until(lambda: gateways.hosts_told(processes.named("gateway.0.1")[0]) == {HERE: 2, FAR: 2})
        processes.named("gateway.1-0.")[0].kill()
    until(lambda: processes.named("gateway.2-0.1"))
    assert not gateways.failure.done()


def test_a_host_that_joins_later_gets_one_and_a_host_that_leaves_loses_it(gateways: SupervisedGateways) -> None:
    gateways.start()
    processes = gateways.processes
    processes.there.append("10.0.0.3")
    until(lambda: processes.named("gateway.2-1.1"))
    processes.there.remove(FAR)
    until(lambda: not processes.named("gateway.1-"))
    assert set(gateways.released) >= {"1-0.1.", "1-1.1."}
    (watching,) = processes.named("gateway.0.1")
    until(lambda: gateways.hosts_told(watching) == {HERE: 2, "10.0.0.3": 2})


def test_the_counts_of_all_hosts_are_added_and_never_go_down(gateways: SupervisedGateways) -> None:
    gateways.start()
    table = gateways.set.table
    until(lambda: table.total(Column.QUEUED) == 3)
    assert table.lasting(0)[7] == 2
    assert table.placed_everywhere[PLACED] == table.placed_everywhere.sum() == 700
    gateways.processes.there.remove(FAR)
    until(lambda: table.total(Column.QUEUED) == 0)
    until(lambda: not table.placed_everywhere.any())
    assert table.lasting(0)[7] == 2
