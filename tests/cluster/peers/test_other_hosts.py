"""Ids that processes of other hosts may run: two hosts with a table each, which know each other by certificates."""

import asyncio
import mmap
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.cluster.errors import InvalidRequest, Superseded
from tandem.cluster.peers import claims as claims_module
from tandem.cluster.peers.claim_clock import ClaimClock
from tandem.cluster.peers.claims import Claim, Claims
from tandem.cluster.peers.far_placements import FarPlacements
from tandem.cluster.peers.hosts import PEER_NAME, GatewayHost, GatewayHosts
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.peer_server import Abroad, PeerServer
from tandem.cluster.peers.placed_tokens import PlacedTokens
from tandem.cluster.peers.table import Column, GatewayTable, table_bytes
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.supervision.authority import Authority
from tandem.proto import inference_pb2, peer_pb2, peer_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.ports.tls import Identity

TOKEN = "a token of all processes"
NEW = Claim("mine", resumes=False, stamp=5, origin=3)
RESUME = Claim("mine", resumes=True, stamp=5, origin=3)
FREE, IN_USE, SUPERSEDED = (
    peer_pb2.CLAIM_OUTCOME_FREE,
    peer_pb2.CLAIM_OUTCOME_IN_USE,
    peer_pb2.CLAIM_OUTCOME_SUPERSEDED,
)
IDENTITY = Authority("c gateways").peer()


def table(processes: int = 2, process: int = 0, memory: mmap.mmap | None = None) -> GatewayTable:
    return GatewayTable(memory or mmap.mmap(-1, table_bytes(processes, 1)), processes, 1, process)


def requests(claims: Claims) -> ActiveRequests:
    """Makes an ActiveRequests with no call under way. What it would need for a call is missing."""
    missing: Any = None
    validator: Any = SimpleNamespace(vocab_size=2)
    shared = claims._table
    return ActiveRequests(validator, missing, missing, None, (), shared, claims, max_attempts=1, request_seconds=1.0)


def test_a_claim_outlasts_the_connection_to_a_lost_host() -> None:
    """A question for a new process closes it, and the claim would end the call that asks."""

    async def test() -> peer_pb2.ClaimOutcome:
        links = PeerLinks(table(), TOKEN, IDENTITY, number=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            lost = GatewayHost(3, "lost", (f"127.0.0.1:{silent.getsockname()[1]}",))
            links.update_hosts(GatewayHosts(1, (lost,)))
            claiming = asyncio.create_task(Claims(links._table, links).outcome(RESUME, links.hosts))
            await asyncio.sleep(0.1)
            links.update_hosts(GatewayHosts(2))
            links.stub("127.0.0.1:1")
            outcome = await claiming
        await links.close()
        return outcome

    assert asyncio.run(test()) == FREE


class Hosts:
    """This host's claims, and another host with two processes. The second one runs what the test says."""

    def __init__(self) -> None:
        self.links = PeerLinks(table(), TOKEN, IDENTITY, number=1)
        self.claims = Claims(self.links._table, self.links)
        memory = mmap.mmap(-1, table_bytes(2, 1))
        self.there = [table(2, process, memory) for process in range(2)]
        self.asked: list[Claim] = []
        self.outcome = FREE
        self.peers: list[str] = []

    async def _give(self, claim: Claim) -> peer_pb2.ClaimOutcome:
        self.asked.append(claim)
        return self.outcome

    async def run(self, test: Callable[["Hosts"], Awaitable[None]]) -> None:
        near = PeerLinks(self.there[0], TOKEN)
        first = requests(Claims(self.there[0], near))
        gateways = lambda: [inference_pb2.GatewayProcessInfo(process=1, pid=7, host="far")]  # noqa: E731
        servers = []
        for process, give, give_host in ((0, first.give, first.give_host), (1, self._give, self._give)):
            abroad = Abroad("127.0.0.1", IDENTITY, give_host, gateways, lambda: self.there[0].placed)
            server = PeerServer(TOKEN, give, lambda _: False, lambda _: None, abroad)
            self.there[process].put(Column.SOCKET, await server.start())
            servers.append(server)
        self.peers = [server.address for server in servers]
        self.know(*self.peers[:1])
        try:
            await test(self)
        finally:
            self.claims.close()
            for links in (self.links, near):
                await links.close()
            for server in servers:
                await server.stop()

    def know(self, *peers: str, version: int = 1) -> None:
        own = GatewayHost(1, "here", ("127.0.0.1:1",))
        far = (GatewayHost(0, "far", peers),) if peers else ()
        self.links.update_hosts(GatewayHosts(version, (own, *far)))

    def hold(self) -> None:
        """The other host's second process runs the id."""
        self.there[1].add(self.there[1].id_column(NEW.request_id), 1)

    async def take(self, claim: Claim) -> None:
        await self.claims.take(claim, self.claims.asked(claim))


def test_a_resume_asks_one_process_of_each_other_host_and_that_one_whoever_may_run_it() -> None:
    async def test(hosts: Hosts) -> None:
        await hosts.take(RESUME)
        assert hosts.asked == []
        hosts.hold()
        await hosts.take(RESUME)
        assert hosts.asked == [RESUME]
        assert hosts.there[0].of(0, Column.CLOCK) == RESUME.stamp  # its own calls come later from now on

    asyncio.run(Hosts().run(test))


@pytest.mark.parametrize(
    ("outcome", "error", "why"),
    [(IN_USE, InvalidRequest, "'mine' is in use"), (SUPERSEDED, Superseded, "a later call has taken")],
)
def test_what_another_host_refuses_is_refused(outcome: peer_pb2.ClaimOutcome, error: type[Exception], why: str) -> None:
    async def test(hosts: Hosts) -> None:
        hosts.hold()
        hosts.outcome = outcome
        with pytest.raises(error, match=why):
            await hosts.take(RESUME)

    asyncio.run(Hosts().run(test))


def test_a_new_id_asks_no_other_host() -> None:
    async def test(hosts: Hosts) -> None:
        hosts.hold()
        assert hosts.claims.asked(NEW) == []

    asyncio.run(Hosts().run(test))


def test_where_one_process_of_a_host_is_gone_the_next_is_asked() -> None:
    async def test(hosts: Hosts) -> None:
        hosts.know("127.0.0.1:1", hosts.peers[1], version=2)
        await hosts.take(RESUME)
        assert hosts.asked == [RESUME]

    asyncio.run(Hosts().run(test))


def test_a_host_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "ANSWER_SECONDS", 60.0)

    async def test(hosts: Hosts) -> None:
        hosts.know("127.0.0.1:1", version=2)
        taking = asyncio.create_task(hosts.take(RESUME))
        await asyncio.sleep(0.1)
        assert not taking.done()
        hosts.know(version=1)  # which is old
        assert hosts.claims.asked(RESUME)
        hosts.know(version=3)
        await asyncio.wait_for(taking, 20)
        assert hosts.claims.asked(RESUME) == []

    asyncio.run(Hosts().run(test))


def test_many_resumes_of_a_silent_host_leave_no_questions_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(claims_module, "MOST_ASKING", 3)

    async def test(hosts: Hosts) -> None:
        hosts.know("127.0.0.1:1", version=2)
        for _ in range(6):
            await hosts.take(RESUME)
        async with asyncio.timeout(20):
            while len(hosts.claims._asking) > 3:
                await asyncio.sleep(0.01)

    asyncio.run(Hosts().run(test))


def test_the_processes_of_other_hosts_are_known_and_a_silent_host_has_a_row() -> None:
    async def test(hosts: Hosts) -> None:
        (known,) = await hosts.links.gateways()
        assert (known.host, known.process, known.pid) == ("far", 1, 7)
        hosts.know("127.0.0.1:1", version=2)
        (silent,) = await hosts.links.gateways()
        assert (silent.host, silent.pid) == ("far", 0)

    asyncio.run(Hosts().run(test))


def test_a_workers_load_is_also_what_other_hosts_have_placed_until_they_are_gone() -> None:
    async def test(hosts: Hosts) -> None:
        here, beside = (PlacedTokens(hosts.links._table, 0, pe) for pe in (7, 8))
        for process, tokens in enumerate((30, 12)):
            PlacedTokens(hosts.there[process], 0, 7).tokens.add(tokens)
        PlacedTokens(hosts.there[0], 0, 8).prompts.add(5)
        here.tokens.add(1)
        far = FarPlacements(hosts.links._table, hosts.links)
        await far.look()
        assert (here.tokens.of_all, here.tokens.own, beside.prompts.of_all) == (43, 1, 5)
        PlacedTokens(hosts.there[0], 0, 7).tokens.add(-30)
        await far.look()
        assert here.tokens.of_all == 13
        assert hosts.links._table.placed.sum() == 1
        hosts.know(version=2)
        await far.look()
        assert (here.tokens.of_all, beside.prompts.of_all) == (1, 0)

    asyncio.run(Hosts().run(test))


@pytest.mark.parametrize(
    "who", ["plain", "no certificate", "a worker", "a gateway to workers", "another cluster", "no token"]
)
def test_strangers_and_workers_are_not_heard(who: str) -> None:
    workers, theirs = Authority("c"), Authority("d gateways").peer()
    authority = IDENTITY.authority

    def shown(identity: Identity) -> grpc.ChannelCredentials:
        return Identity(authority, identity.certificate, identity.key).channel_credentials()

    async def test(hosts: Hosts) -> None:
        credentials = {
            "plain": None,
            "no certificate": grpc.ssl_channel_credentials(authority),
            "a worker": shown(workers.worker()),
            "a gateway to workers": shown(workers.gateway()),
            "another cluster": shown(theirs),
            "no token": IDENTITY.channel_credentials(),
        }[who]
        options = [("grpc.ssl_target_name_override", PEER_NAME)]
        channel = (
            grpc.aio.insecure_channel(hosts.peers[1])
            if credentials is None
            else grpc.aio.secure_channel(hosts.peers[1], credentials, options=options)
        )
        async with channel:
            stub = authorized(peer_pb2_grpc.PeerStub(channel), "" if who == "no token" else TOKEN)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Claim(peer_pb2.ClaimRequest(request_id="mine", resumes=True, whole_host=True), timeout=20)
        expected = grpc.StatusCode.UNAUTHENTICATED if who == "no token" else grpc.StatusCode.UNAVAILABLE
        assert caught.value.code() == expected
        assert hosts.asked == []

    asyncio.run(Hosts().run(test))


def test_processes_of_all_hosts_look_in_turns() -> None:
    links = [PeerLinks(table(), TOKEN, IDENTITY, number) for number in (3, 5)]
    assert links[0].turn(1, 2) == (1, 2)
    for one in links:
        one.update_hosts(GatewayHosts(1, (GatewayHost(5, "b", ("b:1",)), GatewayHost(3, "a", ("a:1",)))))
    assert [one.turn(process, 2) for one in links for process in (0, 1)] == [(0, 4), (1, 4), (2, 4), (3, 4)]


class TestClock:
    def test_numbers_rise_over_the_processes_of_a_host_and_behind_all_that_was_seen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = mmap.mmap(-1, table_bytes(2, 1))
        one, other = (ClaimClock(table(2, process, memory)) for process in range(2))
        numbers = [one.next(), other.next(), other.next(), one.next()]
        far = max(numbers) + (1 << 50)  # of a host whose time of day is two weeks ahead
        other.see(far)
        other.see(5)
        numbers.append(one.next())
        assert numbers[-1] > far
        monkeypatch.setattr(time, "time_ns", lambda: 7)  # it was set back
        numbers += [other.next(), one.next()]
        assert numbers == sorted(set(numbers))

    def test_hosts_that_have_not_heard_of_each_other_go_by_the_time_of_day(self) -> None:
        clocks = [ClaimClock(table()) for _ in range(2)]
        numbers = [clocks[number % 2].next() for number in range(20)]
        assert numbers == sorted(numbers)

    def test_of_equal_numbers_the_process_decides(self) -> None:
        one, other = Claim("x", True, 9, origin=64), Claim("x", True, 9, origin=65)
        assert other.is_after(one)
        assert not one.is_after(other)
        assert not one.is_after(one)
        assert Claim("x", True, 10).is_after(other)
