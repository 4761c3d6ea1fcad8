"""One peer leaves an elastic island, or is lost, and another process takes its place, while the others go on."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.errors import MembershipRefused, PeerGone, TransportError
from tandem.transfer.factory import TRANSPORTS, create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.contracts.islands import NUM_SLOTS, pages_of, registered_island
from tests.support.transports import skip_without
from tests.support.waiting import until
from tests.transfer.layouts import two_groups
from tests.transfer.peer_process import peer_config
from tests.transfer.peers import Peer, join_all

NUM_PES = 3
FIRST, SECOND = 7, 9  # epochs of PE 1
EVERYTHING = np.arange(NUM_SLOTS, dtype=np.int32)
CONFIG = TransportConfig(
    0, NUM_PES, two_groups(), pages_of(two_groups()), num_signals=4, island="contract", epoch=FIRST
)


@pytest.fixture(params=["tcp", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    skip_without(request.param)
    return request.param


@pytest.fixture
def island(name: str) -> Iterator[list[Transport]]:
    """Makes an island. A replaced second PE is at the end of the list once more."""
    transports = registered_island(name, CONFIG)
    handles = [transport.open() for transport in transports]
    for transport in transports:
        transport.join(handles)
    yield transports
    for transport in transports:
        transport.close()


def successor(name: str, island: list[Transport], epoch: int = SECOND) -> Transport:
    """Makes a process that takes the place of PE 1, which the others have cut."""
    epochs = (FIRST, epoch, FIRST)
    new = create_transport(name, replace(CONFIG.of(1), epoch=epoch, epochs=epochs))
    island.append(new)
    others = [island[0], island[2]]
    handle = new.open()
    first, last = (other.offer(1, epoch) for other in others)
    new.join([first, handle, last])
    for other in others:
        other.reach(1, handle)
        other.admit(1)
    return new


def tokens(source: Transport, group: int, count: int, value: float) -> torch.Tensor:
    layers = CONFIG.layout.groups[group]
    dtype = source.layout.stored_dtype_of(group)
    return torch.full((count, layers.num_kv_heads, layers.head_dim), value, dtype=dtype)


def check_writes(source: Transport, target: Transport, value: float) -> None:
    """Checks that everything is written, and then a signal."""
    for group, pool in enumerate(source.pools):
        pool.fill_(value)
        source.write_slots(target.pe, group, EVERYTHING, EVERYTHING)
        k = tokens(source, group, 3, value)
        source.write_tokens(target.pe, group, 0, k, k, torch.arange(3), torch.arange(3))
    source.post(target.pe, 2, int(value), source.pe)
    until(lambda: int(target.mailbox()[2, 0]) == int(value))
    assert all(bool((pool == value).all()) for pool in target.pools)
    source.quiet(target.pe)


def test_a_peer_that_was_cut_is_gone_and_the_others_go_on(island: list[Transport]) -> None:
    own, _, other = island
    own.write_slots(1, 0, EVERYTHING, EVERYTHING)
    before = own.fence(1)
    own.cut(1)
    own.cut(1)
    assert own.lost == ""
    assert before.is_quiet()
    assert own.fence(1).is_quiet()
    own.quiet(1)
    k = tokens(own, 0, 1, 0)
    for call in (
        lambda: own.write_slots(1, 0, EVERYTHING, EVERYTHING),
        lambda: own.write_tokens(1, 0, 0, k, k, torch.arange(1), torch.arange(1)),
        lambda: own.post(1, 0, 1, 1),
    ):
        with pytest.raises(PeerGone, match="PE 1: it was cut off"):
            call()
    check_writes(own, other, 3)
    check_writes(other, own, 4)


def test_another_process_takes_the_place_of_a_peer(name: str, island: list[Transport]) -> None:
    own, old, other = island
    for one in (own, other):
        one.cut(1)
    check_writes(own, other, 2)
    old.pools[0].fill_(-1)
    new = successor(name, island)
    for value, (source, target) in enumerate(
        [(own, new), (new, own), (other, new), (new, other), (own, other), (other, own)], 3
    ):
        check_writes(source, target, value)
    assert [one.lost for one in (own, other, new)] == [""] * 3
    with pytest.raises(PeerGone):
        until(lambda: old.post(0, 0, 1, 1))
    assert not own.mailbox()[0].any()


def test_places_are_taken_again_and_again(name: str, island: list[Transport]) -> None:
    for epoch in range(SECOND, SECOND + 3):
        for one in (island[0], island[2]):
            one.cut(1)
        if epoch > SECOND:
            island[-1].close()
        new = successor(name, island, epoch)
        check_writes(island[0], new, epoch)
        check_writes(new, island[2], epoch + 1)


def test_an_offer_that_nobody_took_can_be_made_again(name: str, island: list[Transport]) -> None:
    for one in (island[0], island[2]):
        one.cut(1)
        one.offer(1, SECOND)
        one.offer(1, SECOND + 1)
        one.cut(1)
    check_writes(island[0], successor(name, island, SECOND + 2), 5)


def test_a_place_may_stay_free(name: str) -> None:
    """PE 1 joins while the place of PE 2 is empty; PE 2 comes later."""
    epochs = (FIRST, SECOND, 0)
    with ExitStack() as stack:
        first, second, third = (
            create_transport(name, replace(CONFIG.of(pe), epoch=epoch, epochs=known))
            for pe, epoch, known in ((0, FIRST, (FIRST, SECOND, 0)), (1, SECOND, epochs), (2, 11, (FIRST, SECOND, 11)))
        )
        handles = [first.open(), second.open(), b""]
        for one in (first, second, third):
            stack.callback(one.close)
        for one in (first, second):
            one.join(handles)
        check_writes(first, second, 2)
        with pytest.raises(PeerGone, match="PE 2: nobody has its place"):
            first.post(2, 0, 1, 1)
        handle = third.open()
        third.join([first.offer(2, 11), second.offer(2, 11), handle])
        for one in (first, second):
            one.reach(2, handle)
            one.admit(2)
        check_writes(third, second, 3)
        check_writes(first, third, 4)


def test_a_handle_of_an_earlier_epoch_is_refused(island: list[Transport]) -> None:
    own, old, _ = island
    for one, peer in ((own, 1), (old, 0)):
        one.cut(peer)
    stale = old.offer(0, SECOND)
    with pytest.raises(InvalidArgument, match=f"epoch of PE 1 is {FIRST}; it must be later than {FIRST}"):
        own.offer(1, FIRST)
    own.offer(1, SECOND)
    with pytest.raises(MembershipRefused, match=f"PE 1's handle has epoch {FIRST}; {SECOND} is expected here"):
        own.reach(1, stale)


def test_a_peer_that_is_there_is_not_replaced(island: list[Transport]) -> None:
    with pytest.raises(TransportError, match="PE 1 is still there; cut"):
        island[0].offer(1, SECOND)
    with pytest.raises(InvalidArgument, match=r"pe is 0, this PE itself; it must be another one from 0 to 2"):
        island[0].cut(0)


@pytest.mark.parametrize("fixed", [name for name, one in TRANSPORTS.items() if one.devices == ("cpu",)][:1])
def test_peers_of_other_transports_stay(fixed: str) -> None:
    for transport in registered_island(fixed, CONFIG)[:1]:
        assert not transport.elastic
        with pytest.raises(TransportError, match="PE 1 cannot be replaced: the peers of SharedMemoryTransport stay"):
            transport.cut(1)


@contextmanager
def writing_without_end(name: str) -> Iterator[tuple[Transport, Peer]]:
    """Yields PE 0, and PE 1, a process that fills PE 0's pages for ever."""
    with ExitStack() as stack:
        peer = Peer.start(1, 2, name)
        stack.callback(peer.end)
        own = create_transport(name, peer_config(0, 2))
        stack.callback(own.close)
        join_all(own, [peer])
        peer.write("forever")
        assert peer.read() == "pushing"
        yield own, peer


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP, None])
def test_nothing_that_a_cut_peer_wrote_lands(name: str, end: signal.Signals | None) -> None:
    """The peer is dead in the middle of its writes, stopped there, or alive and still writing."""
    with writing_without_end(name) as (own, peer):
        until(lambda: float(own.pools[0].max()) > 3)
        if end is not None:
            os.kill(peer.process.pid, end)
        own.cut(1)
        for pool in own.pools:
            pool.fill_(-1)
        mailbox = own.mailbox()
        if end == signal.SIGSTOP:
            os.kill(peer.process.pid, signal.SIGCONT)
        for _ in range(20):
            time.sleep(0.01)
            assert all(bool((pool == -1).all()) for pool in own.pools)
        assert bool((own.mailbox() == mailbox).all())
