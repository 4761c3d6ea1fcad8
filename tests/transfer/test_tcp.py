"""Checks what the contract suite cannot see: order across connections, losses, epochs, strangers, and the bytes on the
wire."""

import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cluster.supervision.authority import Authority
from tandem.transfer.completion import pack_signal
from tandem.transfer.endpoint import Endpoint
from tandem.transfer.errors import MembershipRefused, PeerGone, TransportError, TransportTimeout
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp import frames, sending
from tandem.transfer.tcp.connections import connect
from tandem.transfer.tcp.frames import DATA_CONNECTIONS, HEADER, Kind, SignalFrame
from tandem.transfer.tcp.hello import PROTOCOL, Hello
from tandem.transfer.tcp.memory import bytes_of
from tandem.transfer.tcp.transport import TcpTransport
from tests.support.waiting import until
from tests.transfer.layouts import PAGE_SIZE, two_groups
from tests.transfer.peer_process import peer_config
from tests.transfer.peers import StartPeer, check_rounds, join_all

NUM_PAGES = 64
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
LAYOUT = two_groups()
EVERYTHING = np.arange(NUM_SLOTS, dtype=np.int32)


def config_of(pe: int, num_pes: int = 2, epoch: int = 7) -> TransportConfig:
    return TransportConfig(pe, num_pes, LAYOUT, (NUM_PAGES,) * 2, num_signals=4, island="tcp", epoch=epoch)


@contextmanager
def joined(num_pes: int = 2, endpoints: list[Endpoint] | None = None) -> Iterator[list[TcpTransport]]:
    configs = [config_of(pe, num_pes) for pe in range(num_pes)]
    if endpoints:
        configs = [replace(config, endpoint=one) for config, one in zip(configs, endpoints, strict=True)]
    with ExitStack() as stack:
        transports = [TcpTransport(config) for config in configs]
        for transport in transports:
            stack.callback(transport.close)
        handles = [transport.open() for transport in transports]
        for transport in transports:
            transport.join(handles)
        yield transports


@pytest.fixture
def pair() -> Iterator[list[TcpTransport]]:
    with joined() as transports:
        yield transports


def handle_of(transport: TcpTransport) -> tuple[tuple[str, int], str]:
    detail = json.loads(transport.open())["detail"]
    return (detail["host"], detail["port"]), detail["token"]


def hello(number: int, key: str, **other: object) -> Hello:
    return replace(Hello(PROTOCOL, "tcp", 7, 0, 1, number, key), **other)  # type: ignore[arg-type]


@pytest.fixture
def receiver() -> Iterator[tuple[TcpTransport, list[socket.socket]]]:
    """PE 1, whose PE 0 is this test: its data connections, then the one for signals."""
    transport = TcpTransport(config_of(1))
    address, token = handle_of(transport)
    with ExitStack() as stack:
        stack.callback(transport.close)
        sockets = [
            stack.enter_context(connect(config_of(0).endpoint, address, hello(number, token)))
            for number in range(DATA_CONNECTIONS + 1)
        ]
        yield transport, sockets


def memory_of(transport: TcpTransport) -> list[torch.Tensor]:
    """The pools of one that did not join."""
    assert transport._memory is not None
    return list(transport._memory.tensors)


def wait_for_end(connection: socket.socket) -> None:
    connection.settimeout(30)
    with suppress(ConnectionError):
        assert connection.recv(1) == b""


class Gate:
    """Holds what one data connection sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        send = sending.send_parts

        def held(connection: socket.socket, parts: list[frames.FramePart]) -> None:
            if threading.current_thread().name.endswith(f"-{number}"):
                self.reached.set()
                self._open.wait(60)
            send(connection, parts)

        monkeypatch.setattr(sending, "send_parts", held)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("number", range(DATA_CONNECTIONS))
def test_a_signal_waits_for_the_slowest_of_all_connections(
    monkeypatch: pytest.MonkeyPatch, pair: list[TcpTransport], number: int
) -> None:
    monkeypatch.setattr(frames, "FRAME_BYTES", LAYOUT.page_bytes(0))  # a frame a page
    gate, (sender, receiver) = Gate(monkeypatch, number), pair
    sender.pools[0].normal_()
    sender.write_slots(1, 0, EVERYTHING, EVERYTHING)
    sender.post(1, 2, pack_signal(1, 5), 6)
    fence, peer = sender.fence(1), sender._peers[1]
    assert min(peer.given) > 0
    assert gate.reached.wait(30)
    others = [other for other in range(DATA_CONNECTIONS) if other != number]
    until(lambda: all(peer.acknowledged[other] == peer.given[other] for other in others))
    assert not receiver.mailbox().any()
    assert not fence.is_quiet()
    gate.open()
    until(lambda: receiver.mailbox()[2].tolist() == [pack_signal(1, 5), 6])
    assert torch.equal(receiver.pools[0], sender.pools[0])
    until(fence.is_quiet)


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_end_as_copies_in_one_process_do(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Three PEs, each into halves of the others' pages that are its own."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(frames, "FRAME_BYTES", int(rng.integers(1, 4)) * LAYOUT.page_bytes(0))
    monkeypatch.setattr(frames, "STAGED_BYTES", int(rng.integers(64, 2000)))
    with joined(3) as pes:
        for pe in pes:
            for pool in pe.pools:
                pool.normal_(generator=torch.Generator().manual_seed(seed))
        expected = [[pool.clone() for pool in pe.pools] for pe in pes]
        half = NUM_SLOTS // 2
        for step in range(40):
            source, target = rng.choice(3, 2, replace=False).tolist()
            free = half // 2 * ((target - source) % 3 - 1)  # a quarter of the slots for each writer
            group = int(rng.integers(2))
            pages = rng.permutation(half // 2 // PAGE_SIZE)[: rng.integers(1, 9)] * PAGE_SIZE
            slots = (pages[:, None] + np.arange(PAGE_SIZE)).reshape(-1)[: rng.integers(1, 30)].astype(np.int32)
            targets = slots + np.int32(free)
            pool, into = expected[source][group], expected[target][group]
            if rng.integers(2):
                sources = np.sort(rng.permutation(half)[: slots.size]).astype(np.int32) + np.int32(half)
                sources = slots + np.int32(half) if rng.integers(2) else sources
                pes[source].write_slots(target, group, sources, targets)
                values = pool[sources // PAGE_SIZE, :, :, :, sources % PAGE_SIZE]
                into[targets // PAGE_SIZE, :, :, :, targets % PAGE_SIZE] = values
            else:
                of = LAYOUT.groups[group]
                layer, indices = int(rng.integers(len(of.layers))), torch.arange(slots.size)
                k, v = torch.randn(2, slots.size, of.num_kv_heads, of.head_dim)
                pes[source].write_tokens(target, group, layer, k, v, indices, torch.from_numpy(targets))
                into[targets // PAGE_SIZE, layer, 0, :, targets % PAGE_SIZE] = k
                into[targets // PAGE_SIZE, layer, 1, :, targets % PAGE_SIZE] = v
            pes[source].quiet(target)
            pes[source].post(target, source, pack_signal(step + 1, 0), step)
            until(lambda to=pes[target], row=source, step=step: int(to.mailbox()[row, 1]) == step)
        for pe, pools in zip(pes, expected, strict=True):
            assert all(torch.equal(pool, want) for pool, want in zip(pe.pools, pools, strict=True))


@pytest.mark.long
def test_two_processes_push_to_a_third_and_every_signal_comes_after_its_data(start_peer: StartPeer) -> None:
    own = TcpTransport(peer_config(0, 3))
    check_rounds(own, [start_peer(1, 3, "tcp"), start_peer(2, 3, "tcp")], rounds=30)


def test_kill_9_of_a_peer_at_work_is_said_to_whoever_writes_to_it(start_peer: StartPeer) -> None:
    peer, own = start_peer(1, 2, "tcp"), TcpTransport(peer_config(0, 2))
    join_all(own, [peer])
    peer.write("forever")
    assert peer.read() == "pushing"
    assert own.lost == ""
    peer.end()
    until(lambda: own.lost)
    for call in (lambda: own.write_slots(1, 0, EVERYTHING[:4], EVERYTHING[:4]), lambda: own.post(1, 0, 1, 1)):
        with pytest.raises(PeerGone, match=r"PE 1: .*connection"):
            call()
    own.close()


@pytest.mark.parametrize("number", [0, DATA_CONNECTIONS])
def test_a_connection_that_is_lost_during_a_write_fails_it_and_no_signal_comes_without_its_data(
    monkeypatch: pytest.MonkeyPatch, pair: list[TcpTransport], number: int
) -> None:
    gate, (sender, receiver) = Gate(monkeypatch, 0), pair
    sender.pools[0].normal_()
    sender.write_slots(1, 0, EVERYTHING, EVERYTHING)
    sender.post(1, 2, pack_signal(1, 5), 6)
    fence = sender.fence(1)
    assert gate.reached.wait(30)
    socket.socket.shutdown(sender._peers[1]._sockets[number], socket.SHUT_RDWR)
    gate.open()
    asking = [fence.is_quiet, lambda: sender.quiet(1)] if number == 0 else []  # else all may have landed
    writing = [lambda: sender.write_slots(1, 0, EVERYTHING, EVERYTHING), lambda: sender.post(1, 2, 1, 1)]
    until(lambda: sender.lost)
    for call in asking + writing:
        with pytest.raises(PeerGone, match="PE 1: "):
            call()
    until(lambda: receiver.lost)
    if receiver.mailbox()[2].any():  # its own connection was lost after it
        assert number == DATA_CONNECTIONS
        assert torch.equal(receiver.pools[0], sender.pools[0])


def test_a_late_host_does_not_write_into_the_pages_of_an_epoch_that_ended(
    receiver: tuple[TcpTransport, list[socket.socket]],
) -> None:
    transport, (connection, *_) = receiver
    pool = memory_of(transport)[0]
    places = np.array([[3, 2]], "<i4").tobytes()
    connection.sendall(HEADER.pack(Kind.PAGES, 0, 0, 1) + places + b"\x01" * LAYOUT.page_bytes(0))
    until(lambda: bytes_of(pool[3])[-1] == 1)
    transport.close()
    pool.fill_(-1)  # another epoch's
    with suppress(ConnectionError):
        connection.sendall(b"\x02" * LAYOUT.page_bytes(0))
    wait_for_end(connection)
    assert bool((pool == -1).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 6}, "epoch is 6; 7 is expected here"),
        ({"island": "other"}, "island is 'other'; 'tcp' is expected here"),
        ({"to_pe": 0}, "to_pe is 0; 1 is expected here"),
        ({"pe": 1}, "pe is 1; another one of 0 … 1 is expected here"),
        ({"pe": 5}, "pe is 5; another one of 0 … 1 is expected here"),
        ({"token": "00" * 16}, "token is another one"),
        ({"connection": 9}, f"connection is 9; it must be from 0 to {DATA_CONNECTIONS}"),
        ({"protocol": 2}, "protocol is 2; 1 is expected here"),
    ],
)
def test_a_connection_of_another_epoch_or_without_the_token_is_refused(change: dict[str, object], message: str) -> None:
    transport = TcpTransport(config_of(1))
    address, token = handle_of(transport)
    with pytest.raises(MembershipRefused, match=message):
        connect(transport.config.endpoint, address, hello(0, token, **change))
    first = connect(transport.config.endpoint, address, hello(0, token))
    with first, pytest.raises(MembershipRefused, match="connection 0 of PE 0 was there already"):
        connect(transport.config.endpoint, address, hello(0, token))
    transport.close()
    with pytest.raises(PeerGone, match="PE 1 at "):
        connect(transport.config.endpoint, address, hello(1, token))


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff", b"\x02\x00{}", b"\x02\x00\xff\xff"])
def test_strangers_are_turned_away_and_do_not_hold_up_a_join(said: bytes) -> None:
    transports = [TcpTransport(config_of(pe)) for pe in range(2)]
    handles = [transport.open() for transport in transports]
    port = json.loads(handles[1])["detail"]["port"]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(said)
    for transport in transports:
        transport.join(handles)
    transports[0].write_slots(1, 0, EVERYTHING, EVERYTHING)
    transports[0].quiet(1)
    for transport in transports:
        transport.close()
    for stranger in strangers:
        wait_for_end(stranger)
        stranger.close()


def test_nobody_can_connect_once_all_have(pair: list[TcpTransport]) -> None:
    for transport in pair:
        address = transport._listeners[transport.pe].address

        def is_closed(address: tuple[str, int] = address) -> bool:
            try:
                socket.create_connection(address, 20).close()
            except ConnectionError:
                return True
            return False

        until(is_closed)


GOOD_SLOT = np.zeros(1, "<i4").tobytes()
BAD_FRAMES = {
    "kind": HEADER.pack(9, 0, 0, 1),
    "group": HEADER.pack(Kind.SLOTS, 2, 0, 1),
    "layer": HEADER.pack(Kind.TOKENS, 0, 2, 1),
    "no places": HEADER.pack(Kind.PAGES, 0, 0, 0),
    "many places": HEADER.pack(Kind.PAGES, 0, 0, frames.MAX_COUNT + 1),
    "many slots": HEADER.pack(Kind.SLOTS, 0, 0, frames.MAX_COUNT + 1),
    "page behind": HEADER.pack(Kind.PAGES, 0, 0, 1) + np.array([NUM_PAGES - 1, 2], "<i4").tobytes(),
    "page before": HEADER.pack(Kind.PAGES, 0, 0, 1) + np.array([-1, 2], "<i4").tobytes(),
    "pages that wrap": HEADER.pack(Kind.PAGES, 0, 0, 1) + np.array([2**31 - 1, 2**31 - 1], "<i4").tobytes(),
    "no pages": HEADER.pack(Kind.PAGES, 0, 0, 1) + np.array([0, 0], "<i4").tobytes(),
    "slot": HEADER.pack(Kind.SLOTS, 0, 0, 1) + np.array([NUM_SLOTS], "<i4").tobytes(),
    "token": HEADER.pack(Kind.TOKENS, 0, 0, 1) + np.array([-1], "<i4").tobytes(),
}


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_frame_outside_the_pages_ends_the_connections_and_writes_nothing(
    receiver: tuple[TcpTransport, list[socket.socket]], bad: bytes
) -> None:
    transport, sockets = receiver
    with suppress(ConnectionError):
        sockets[1].sendall(bad + b"\x01" * 4 * LAYOUT.page_bytes(0))
    for connection in sockets:
        wait_for_end(connection)
    assert not any(pool.any() for pool in memory_of(transport))
    assert "were ended" in transport._peers[0].failure


@pytest.mark.parametrize(
    "bad",
    [
        SignalFrame(Kind.POST, 4, 1, 1, (0,) * 5).pack(),
        SignalFrame(Kind.PAGES, 0, 1, 1, (0,) * 5).pack(),
        SignalFrame(Kind.LANDED, 0, 0, 0, (1,) * 5).pack(),
    ],
    ids=["row", "kind", "landed more than was sent"],
)
def test_a_signal_that_no_pe_sends_ends_the_connections(
    receiver: tuple[TcpTransport, list[socket.socket]], bad: bytes
) -> None:
    transport, sockets = receiver
    sockets[-1].sendall(bad)
    for connection in sockets:
        wait_for_end(connection)
    assert "were ended" in transport._peers[0].failure


class Relay:
    """Passes connections on to an address, and keeps what was sent there."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._target = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pass, args=(client, server, self.seen), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, bytearray()), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with suppress(OSError), source:
            while data := source.recv(65536):
                seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "tls"])
def test_with_certificates_nobody_on_the_way_reads_pages(sealed: bool) -> None:
    """Without certificates this test would see the pages."""
    authority = Authority("tcp pages")
    endpoints = [authority.pages("127.0.0.1") for _ in range(2)] if sealed else [config_of(0).endpoint] * 2
    transports = [TcpTransport(replace(config_of(pe), endpoint=endpoints[pe])) for pe in range(2)]
    handles = [transport.open() for transport in transports]
    detail = json.loads(handles[1])
    relay = Relay((detail["detail"]["host"], detail["detail"]["port"]))
    detail["detail"]["port"] = relay.port
    transports[0].join([handles[0], json.dumps(detail).encode()])
    transports[1].join(handles)
    secret = torch.frombuffer(bytearray(b"what the prompt said ."), dtype=torch.uint8)[:16].view(torch.float32)
    pool = transports[0].pools[0]
    pool.view(-1, 4)[:] = secret
    transports[0].write_slots(1, 0, EVERYTHING, EVERYTHING)
    transports[0].write_tokens(1, 0, 0, pool[0, 0, 0, :, :2], pool[0, 0, 0, :, :2], torch.arange(2), torch.arange(2))
    transports[0].quiet(1)
    assert torch.equal(transports[1].pools[0], pool)
    assert (b"what the prompt " in bytes(relay.seen)) is not sealed
    assert len(relay.seen) > bytes_of(pool).nbytes
    for transport in transports:
        transport.close()
    relay.close()


def test_whoever_has_no_certificate_of_a_pe_is_refused() -> None:
    authority = Authority("tcp pages")
    transport = TcpTransport(replace(config_of(1), endpoint=authority.pages("127.0.0.1")))
    address, token = handle_of(transport)
    gateway = authority.gateway()
    others = {
        "none": config_of(0).endpoint,
        "of another authority": Authority("tcp pages").pages("127.0.0.1"),
        "of a caller": Endpoint("127.0.0.1", gateway.authority, gateway.certificate, gateway.key),
    }
    for endpoint in others.values():
        with pytest.raises(TransportError, match=r"is not of this cluster|cannot be reached"):
            connect(endpoint, address, hello(0, token))
    connect(transport.config.endpoint, address, hello(0, token)).close()
    transport.close()


def test_pages_are_offered_to_other_hosts_with_certificates_only() -> None:
    with pytest.raises(ValueError, match=r"endpoint.host is '0.0.0.0'; without certificates it must be a loopback"):
        TcpTransport(replace(config_of(0), endpoint=Endpoint("0.0.0.0")))


def test_writes_wait_for_a_peer_that_takes_nothing_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, pair: list[TcpTransport]
) -> None:
    monkeypatch.setattr(sending, "MAX_STAGED_BYTES", 1)
    gates = [Gate(monkeypatch, number) for number in range(DATA_CONNECTIONS)]
    sender, receiver = pair
    sender.quiet_seconds = 0.2
    slots, (k, v) = torch.arange(3), torch.randn(2, 3, 2, 8)
    sender.write_tokens(1, 0, 0, k, v, torch.arange(3), slots)
    with pytest.raises(TransportTimeout, match=r"PE 1 has taken nothing for 0.2 s"):
        sender.write_tokens(1, 0, 1, k, v, torch.arange(3), slots)
    with pytest.raises(TransportTimeout, match=r"writes from PE 0 to PE 1 took more than 0.2 s"):
        sender.quiet(1)
    for gate in gates:
        gate.open()
    sender.quiet_seconds = 30.0
    sender.write_tokens(1, 0, 1, k, v, torch.arange(3), slots)
    sender.quiet(1)
    assert torch.equal(receiver.pools[0][0, :, 1, :, :3], torch.stack([v.transpose(0, 1)] * 2))


def left() -> tuple[list[str], list[str]]:
    gc.collect()
    return sorted(os.listdir("/proc/self/fd")), sorted(one.name for one in threading.enumerate() if "tcp" in one.name)


@pytest.mark.parametrize("end", ["closed", "not joined"])
def test_close_leaves_no_thread_and_no_descriptor(end: str) -> None:
    before = left()
    transports = [TcpTransport(config_of(pe, 3)) for pe in range(3)]
    handles = [transport.open() for transport in transports]
    joining: list[Callable[[], None]] = [lambda one=one: one.join(handles) for one in transports]
    for join in joining if end == "closed" else joining[:1]:
        join()
    for transport in transports:
        transport.close()
    assert left() == before
