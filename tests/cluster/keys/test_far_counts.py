"""Limits of keys over two hosts with two processes each, which know each other by certificates."""

import asyncio
import mmap
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tandem.cluster.errors import RateLimited
from tandem.cluster.keys.access import KeyAccess
from tandem.cluster.keys.far_counts import FarCounts
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_cells import WINDOW, KeyCells, Unit
from tandem.cluster.keys.meter import Meter, Paced
from tandem.cluster.peers.hosts import GatewayHost, GatewayHosts
from tandem.cluster.peers.key_counts import KeyCounts
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.peer_server import Abroad, PeerServer
from tandem.cluster.peers.table import Column, GatewayTable, table_bytes
from tandem.cluster.requests.charging.charges import admitted
from tandem.cluster.supervision.authority import Authority
from tandem.proto import peer_pb2

TOKEN = "a token of all processes"
IDENTITY = Authority("c gateways").peer()
KEY = Key("team-a", b"a" * 32, 200, 10_000)
OTHER = Key("other", b"b" * 32, 200, 10_000)


class Host:
    """Two processes, of which the first one asks other hosts."""

    def __init__(self, number: int, keys: tuple[Key, ...] = (KEY, OTHER)) -> None:
        self.number, self.keys = number, keys
        self.memory = mmap.mmap(-1, table_bytes(2, 1))
        self.tables = [GatewayTable(self.memory, 2, 1, process) for process in range(2)]
        self.links = PeerLinks(self.tables[0], TOKEN, IDENTITY, number)
        self.cells = [KeyCells(table) for table in self.tables]
        slots = [cells.open({key.id for key in keys}, int(time.monotonic())) for cells in self.cells]
        self.meters = [Meter(cells, own[KEY.id]) for cells, own in zip(self.cells, slots, strict=True) if KEY.id in own]
        self.far = FarCounts(self.tables[0], self.links, lambda: self.keys)

    async def start(self) -> None:
        missing: Any = None
        counts = lambda: self.cells[0].here(int(time.monotonic()))  # noqa: E731
        abroad = Abroad("127.0.0.1", IDENTITY, missing, missing, missing, counts)
        self.server = PeerServer(TOKEN, missing, missing, missing, abroad)
        self.tables[0].put(Column.SOCKET, await self.server.start())

    def know(self, *hosts: "Host") -> None:
        found = tuple(GatewayHost(host.number, "there", (host.server.address,)) for host in hosts)
        self.links.update_hosts(GatewayHosts(1, found))

    def left(self) -> list[int]:
        return [state.remaining for state in self.meters[0].states(KEY)]

    async def stop(self) -> None:
        await self.links.close()
        await self.server.stop()


def run(test: Callable[[Host, Host], Awaitable[None]], *hosts: Host) -> None:
    async def whole() -> None:
        for host in hosts:
            await host.start()
        for host in hosts:
            host.know(*hosts)
        try:
            await test(*hosts)
        finally:
            for host in hosts:
                await host.stop()

    asyncio.run(whole())


def test_a_host_counts_what_another_one_has() -> None:
    async def test(here: Host, there: Host) -> None:
        for meter, tokens in zip(there.meters, (30, 70), strict=True):
            meter.count(KEY, tokens)
        assert here.left() == [200, 10_000]
        await here.far.look()
        assert here.left() == [198, 9900]
        assert there.left() == [198, 9900]
        await there.far.look()
        await here.far.look()  # and nothing comes back
        assert here.left() == there.left() == [198, 9900]

    run(test, Host(1), Host(2))


def test_what_a_lost_host_has_used_counts_until_it_is_a_minute_old(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(here: Host, there: Host) -> None:
        there.meters[0].count(KEY, 100)
        await here.far.look()
        await there.server.stop()
        here.far = FarCounts(here.tables[0], here.links, lambda: here.keys)  # the process that asked has ended, too
        for seconds, left in [(0, 9900), (30, 9900), (31, 10_000)]:
            now = time.monotonic() + seconds
            monkeypatch.setattr("tandem.cluster.keys.far_counts.time.monotonic", lambda now=now: now)
            await here.far.look()
            assert 10_000 - here.cells[0].used(KEY.id, int(now))[Unit.TOKENS] == left

    run(test, Host(1), Host(2))


def test_what_a_host_has_used_outlasts_its_table() -> None:
    async def test(here: Host, there: Host) -> None:
        there.meters[0].count(KEY, 100)
        await here.far.look()
        again = Host(2)
        again.cells[0]._table = 7  # as GatewayFile gives each table a number
        there.cells[0] = again.cells[0]
        await here.far.look()
        assert here.left() == [199, 9900]
        again.meters[0].count(KEY, 50)
        await here.far.look()
        assert here.left() == [198, 9850]
        await again.links.close()

    run(test, Host(1), Host(2))


def test_hosts_with_unlike_files_do_not_disturb_each_other() -> None:
    stranger = Key("stranger", b"c" * 32)

    async def test(here: Host, there: Host) -> None:
        slot = there.cells[0].open({stranger.id}, int(time.monotonic()))[stranger.id]
        there.cells[0].add(slot, Unit.TOKENS, 5, int(time.monotonic()))
        await here.far.look()
        assert here.left() == [200, 10_000]
        assert here.cells[0].used(stranger.id, int(time.monotonic())) == [0, 0]

    run(test, Host(1), Host(2, (stranger,)))


def test_no_storm_over_hosts_passes_more_than_the_limit() -> None:
    passed: Counter[str] = Counter()

    async def client(host: Host, meter: Meter) -> None:
        access = KeyAccess(KEY, meter)
        while True:
            try:
                await admitted(access, 10, 20)
            except RateLimited as error:
                if error.retry_after_seconds > 1:
                    return
            else:
                passed.update(requests=1, tokens=30)
            await asyncio.sleep(0.001)

    async def test(here: Host, there: Host) -> None:
        asking = [asyncio.create_task(host.far.run()) for host in (here, there)]
        await asyncio.sleep(0.3)
        clients = [client(host, meter) for host in (here, there) for meter in host.meters for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        for task in asking:
            task.cancel()

    run(test, Host(1), Host(2))
    assert 198 <= passed["requests"] <= 204
    assert passed["tokens"] <= 10_200


def test_a_host_that_hears_nothing_serves_on() -> None:
    async def test(here: Host, there: Host) -> None:
        await here.far.look()
        here.meters[0].count(KEY, 10)
        with pytest.raises(Paced):
            here.meters[1].count(KEY, 9000)
        clock = time.monotonic() + 8
        meter = Meter(here.cells[1], here.meters[1]._slot, lambda: clock)
        meter.count(KEY, 9000)

    run(test, Host(1), Host(2))


def test_a_host_that_does_not_answer_holds_others_up_for_a_second() -> None:
    async def test(here: Host, there: Host) -> None:
        await here.far.look()
        await there.server.stop()
        here.meters[0].count(KEY, 10)
        begun, paced = time.monotonic(), 0
        while True:
            await here.far.look()
            try:
                here.meters[1].count(KEY, 700)
            except Paced:
                paced += 1
                assert time.monotonic() - begun < 10
                await asyncio.sleep(0.05)
            else:
                break
        assert paced
        assert time.monotonic() - begun >= 0.9

    run(test, Host(1), Host(2))


def test_a_refusal_before_others_are_heard_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.requests.charging.charges.PACED_LOOKS", 1)

    async def test(here: Host, there: Host) -> None:
        await here.far.look()
        here.meters[0].count(KEY, 10)
        with pytest.raises(RateLimited) as refused:
            await admitted(KeyAccess(KEY, here.meters[1]), 9000, 0)
        assert [one.remaining for one in refused.value.states] == [199, 9990]

    run(test, Host(1), Host(2))


def test_the_first_process_that_is_there_asks() -> None:
    async def test(here: Host, there: Host) -> None:
        second = FarCounts(here.tables[1], here.links, lambda: here.keys)
        there.meters[0].count(KEY, 100)
        asking = asyncio.create_task(second.run())
        await asyncio.sleep(0.3)
        assert here.left() == [200, 10_000]
        here.tables[0].clear(0, 1)
        here.tables[1].put(Column.SOCKET, 1)
        limit = time.monotonic() + 10
        while here.left() != [199, 9900]:
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)
        asking.cancel()

    run(test, Host(1), Host(2))


def test_a_connection_that_is_closed_meanwhile_does_not_end_the_asking() -> None:
    """A question for a new process closes the channels of those that are gone, whose answers may still be awaited."""

    async def test(here: Host, there: Host) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            lost = f"127.0.0.1:{silent.getsockname()[1]}"
            here.links.update_hosts(GatewayHosts(2, (GatewayHost(3, "lost", (lost,)),)))
            asking = asyncio.create_task(here.far.run())
            await asyncio.sleep(0.1)
            here.links.update_hosts(GatewayHosts(3, (GatewayHost(2, "there", (there.server.address,)),)))
            here.links.stub(there.server.address)
            there.meters[0].count(KEY, 100)
            limit = time.monotonic() + 10
            while here.left() != [199, 9900]:
                assert not asking.done()
                assert time.monotonic() < limit
                await asyncio.sleep(0.05)
            asking.cancel()

    run(test, Host(1), Host(2))


@pytest.mark.parametrize(
    "message",
    [
        peer_pb2.GetKeyCountsResponse(ids=[5], cells=b"\xff\xff\xff\xff", counts=bytes(8)),
        peer_pb2.GetKeyCountsResponse(ids=[5], cells=bytes(4), counts=bytes(16)),
        peer_pb2.GetKeyCountsResponse(ids=[5], cells=bytes(3)),
        peer_pb2.GetKeyCountsResponse(cells=bytes(4), counts=bytes(8)),
    ],
)
def test_counts_that_do_not_fit_are_none(message: peer_pb2.GetKeyCountsResponse) -> None:
    with pytest.raises(ValueError, match=r"do not fit|multiple"):
        KeyCounts.from_proto(message, len(Unit), WINDOW)


def test_counts_travel_whole() -> None:
    windows = np.random.default_rng(0).integers(0, 3, (4, len(Unit), WINDOW))
    counts = KeyCounts(np.array([1, 5, 9, (1 << 63) - 1]), windows)
    back = KeyCounts.from_proto(counts.to_proto(), len(Unit), WINDOW)
    assert back.ids.tolist() == counts.ids.tolist()
    assert (back.windows == windows).all()


def test_counts_of_as_many_keys_as_a_file_may_have() -> None:
    keys = (KEY, *(Key(f"team-{number}", number.to_bytes(32, "big"), 200, 10_000) for number in range(999)))

    async def test(here: Host, there: Host) -> None:
        second = int(time.monotonic())
        for number, process in enumerate(there.cells):
            slots = process.open({key.id for key in keys}, second)
            for index, key in enumerate(keys):
                process.add(slots[key.id], Unit.TOKENS, 2 * index + number, second)
        await here.far.look()
        assert [here.cells[1].used(key.id, second) for key in keys] == [[0, 4 * index + 1] for index in range(1000)]

    run(test, Host(1, keys), Host(2, keys))
