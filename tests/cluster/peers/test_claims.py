"""Ids that another gateway process may run: who is asked, and what comes of the answers."""

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
import grpc.aio
import pytest

from tandem.cluster.errors import InvalidRequest, Superseded
from tandem.cluster.peers import claims as claims_module
from tandem.cluster.peers.claims import Claim, Claims
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.peer_server import PeerServer
from tandem.cluster.peers.table import Column, GatewayTable, table_bytes
from tandem.proto import peer_pb2, peer_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.ports.private_socket import private_target

TOKEN = "a token of all processes"
CLAIM = Claim("mine", resumes=False, stamp=5)
FREE, IN_USE, SUPERSEDED = (
    peer_pb2.CLAIM_OUTCOME_FREE,
    peer_pb2.CLAIM_OUTCOME_IN_USE,
    peer_pb2.CLAIM_OUTCOME_SUPERSEDED,
)


class Peers:
    """This process's claims, and two other processes with scripted answers."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, table_bytes(3, 1))
        self.tables = [GatewayTable(memory, 3, 1, process) for process in range(3)]
        self.links = PeerLinks(self.tables[0], TOKEN)
        self.claims = Claims(self.tables[0], self.links)
        self.outcomes = {1: FREE, 2: FREE}
        self.hangs: set[int] = set()
        self.asked: list[tuple[int, Claim]] = []
        self.told: list[tuple[int, int]] = []
        self.waiting: set[int] = set()

    async def _give(self, process: int, claim: Claim) -> peer_pb2.ClaimOutcome:
        self.asked.append((process, claim))
        if process in self.hangs:
            await asyncio.sleep(60)
        return self.outcomes[process]

    def _give_way(self, process: int, client: int) -> bool:
        self.told.append((process, client))
        return process in self.waiting

    async def run(self, test: Callable[["Peers"], Awaitable[None]]) -> None:
        servers = []
        for process in (1, 2):
            give = partial(self._give, process)
            servers.append(PeerServer(TOKEN, give, partial(self._give_way, process), lambda request_id: None))
            self.tables[process].put(Column.SOCKET, await servers[-1].start())
        try:
            await test(self)
        finally:
            self.claims.close()
            await self.links.close()
            for server in servers:
                await server.stop()

    def hold(self, *processes: int) -> None:
        for process in processes:
            self.tables[process].add(self.tables[process].id_column(CLAIM.request_id), 1)

    async def take(self) -> None:
        await self.claims.take(CLAIM, self.claims.holders(CLAIM.request_id))


def test_only_who_may_run_the_id_is_asked() -> None:
    async def test(peers: Peers) -> None:
        assert peers.claims.holders(CLAIM.request_id) == []
        peers.hold(2)
        await peers.take()
        assert peers.asked == [(2, CLAIM)]

    asyncio.run(Peers().run(test))


@pytest.mark.parametrize(
    ("outcome", "error", "why"),
    [(IN_USE, InvalidRequest, "'mine' is in use"), (SUPERSEDED, Superseded, "a later call has taken")],
)
def test_one_that_goes_on_with_it_is_enough(outcome: peer_pb2.ClaimOutcome, error: type[Exception], why: str) -> None:
    async def test(peers: Peers) -> None:
        peers.hold(1, 2)
        peers.outcomes[2] = outcome
        with pytest.raises(error, match=why):
            await peers.take()

    asyncio.run(Peers().run(test))


def test_who_does_not_answer_is_not_waited_for_and_still_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "ANSWER_SECONDS", 0.2)

    async def test(peers: Peers) -> None:
        peers.hold(1, 2)
        peers.hangs.add(1)
        await asyncio.wait_for(peers.take(), 10)
        assert sorted(process for process, _ in peers.asked) == [1, 2]
        assert len(peers.claims._asking) == 1

    asyncio.run(Peers().run(test))


def test_who_ends_meanwhile_runs_it_no_more() -> None:
    async def test(peers: Peers) -> None:
        peers.hold(1)
        peers.tables[1].put(Column.SOCKET, 1)  # nobody listens there
        taking = asyncio.create_task(peers.take())
        await asyncio.sleep(0.1)
        assert not taking.done()
        peers.tables[0].clear(1, restarts=0)
        await asyncio.wait_for(taking, 10)
        assert peers.asked == []

    asyncio.run(Peers().run(test))


@pytest.mark.parametrize("token", ["", "another token"])
def test_strangers_are_not_heard(token: str) -> None:
    async def test(peers: Peers) -> None:
        async with grpc.aio.insecure_channel(private_target(peers.tables[0].of(1, Column.SOCKET))) as channel:
            stub = authorized(peer_pb2_grpc.PeerStub(channel), token)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Claim(peer_pb2.ClaimRequest(request_id="mine", resumes=True, stamp=9), timeout=10)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert peers.asked == []

    asyncio.run(Peers().run(test))


def test_the_process_where_most_of_a_client_waits_is_asked_first_to_let_it_give_way() -> None:
    async def test(peers: Peers) -> None:
        column = peers.tables[0].client_column("much")
        assert not await peers.links.give_way(column)
        assert peers.told == []
        peers.tables[1].add(column, 1)
        peers.tables[2].add(column, 2)
        peers.waiting = {1}
        assert await peers.links.give_way(column)
        assert peers.told == [(2, column), (1, column)]
        peers.waiting = set()
        peers.tables[2].put(Column.SOCKET, 1)  # it has ended
        assert not await peers.links.give_way(column)
        assert peers.told[2:] == [(1, column)]

    asyncio.run(Peers().run(test))
