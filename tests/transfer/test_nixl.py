"""Checks what the contract suite cannot see of NIXL: losses, silence, epochs, strangers' notes, and UCX's interface."""

import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.transfer.completion import pack_signal
from tandem.transfer.endpoint import LOOPBACK, Endpoint
from tandem.transfer.errors import PeerGone, TransportError, TransportTimeout
from tandem.transfer.membership import TransportConfig
from tandem.transfer.tcp.frames import HEADER, Kind
from tests.support.waiting import until
from tests.transfer.layouts import PAGE_SIZE, two_groups
from tests.transfer.peer_process import peer_config
from tests.transfer.peers import StartPeer, check_rounds, join_all

pytest.importorskip("nixl", reason="nixl is not installed; pip install 'tandem-serve[nixl]'")

from tandem.transfer.nixl import devices, exchange, transport  # needs the package
from tandem.transfer.nixl.peer import NOTE, SLOTS, Item, Note
from tandem.transfer.nixl.peer import Kind as NoteKind
from tandem.transfer.nixl.transport import NixlTransport

NUM_PAGES = 64
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
LAYOUT = two_groups()
EVERYTHING = np.arange(NUM_SLOTS, dtype=np.int32)


def config_of(pe: int, num_pes: int = 2, epoch: int = 7) -> TransportConfig:
    return TransportConfig(pe, num_pes, LAYOUT, (NUM_PAGES,) * 2, num_signals=4, island="nixl", epoch=epoch)


@contextmanager
def joined(num_pes: int = 2, endpoint: Endpoint = LOOPBACK) -> Iterator[list[NixlTransport]]:
    with ExitStack() as stack:
        pes = [NixlTransport(replace(config_of(pe, num_pes), endpoint=endpoint)) for pe in range(num_pes)]
        for one in pes:
            stack.callback(one.close)
        handles = [one.open() for one in pes]
        for one in pes:
            one.join(handles)
        yield pes


@pytest.fixture
def pair() -> Iterator[list[NixlTransport]]:
    with joined() as pes:
        yield pes


class Gate:
    """Holds what the exchange calls done, from the first write of that many bytes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: "Any") -> None:
        self.is_open, self.reached = False, threading.Event()
        is_done = exchange.Exchange._is_done

        def gated(one: exchange.Exchange, handle: Any, link: Any) -> bool:
            if handle is None or self.is_open or one is not held._exchange:
                return is_done(one, handle, link)
            self.reached.set()
            return False

        monkeypatch.setattr(exchange.Exchange, "_is_done", gated)


def test_a_signal_and_a_fence_wait_for_all_writes_before_them(
    monkeypatch: pytest.MonkeyPatch, pair: list[NixlTransport]
) -> None:
    sender, receiver = pair
    gate = Gate(monkeypatch, sender)
    sender.pools[0].normal_()
    sender.write_slots(1, 0, EVERYTHING, EVERYTHING)
    sender.post(1, 2, pack_signal(1, 5), 6)
    fence = sender.fence(1)
    assert gate.reached.wait(30)
    until(lambda: torch.equal(receiver.pools[0], sender.pools[0]))  # it is there, and nobody has said so
    assert not receiver.mailbox().any()
    assert not fence.is_quiet()
    gate.is_open = True
    until(lambda: receiver.mailbox()[2].tolist() == [pack_signal(1, 5), 6])
    until(fence.is_quiet)


class Event:
    """An event like a GPU's."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come


def test_layers_go_as_they_are_stored_and_no_sooner(monkeypatch: pytest.MonkeyPatch, pair: list[NixlTransport]) -> None:
    monkeypatch.setattr(transport, "STAGE_BYTES", 1)
    sender, receiver = pair
    first, last = Event(), Event()
    stages: Any = [(1, first), (2, last)]
    slots = np.arange(8 * PAGE_SIZE, dtype=np.int32)
    sender.write_slots(1, 0, slots, slots + 4 * PAGE_SIZE, stages)
    sender.pools[0].normal_()  # it is computed now
    first.has_come = True
    until(lambda: torch.equal(receiver.pools[0][4:12, 0], sender.pools[0][:8, 0]))
    assert not receiver.pools[0][:, 1].any()
    sender.pools[0][:, 1].normal_()
    last.has_come = True
    sender.quiet(1)
    assert torch.equal(receiver.pools[0][4:12], sender.pools[0][:8])
    assert not receiver.pools[0][12:].any()


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_end_as_copies_in_one_process_do(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Three PEs, each into halves of the others' pages that are its own."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(transport, "WRITE_BYTES", int(rng.integers(1, 4)) * LAYOUT.page_bytes(0))
    monkeypatch.setattr("tandem.transfer.nixl.memory.STAGED_BYTES", int(rng.integers(64, 2000)))
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
            pes[source].post(target, source, pack_signal(step + 1, 0), step)
            until(lambda to=pes[target], row=source, step=step: int(to.mailbox()[row, 1]) == step)
        for pe, pools in zip(pes, expected, strict=True):
            assert all(torch.equal(pool, want) for pool, want in zip(pe.pools, pools, strict=True))


def test_two_processes_push_to_a_third_and_every_signal_comes_after_its_data(start_peer: StartPeer) -> None:
    own = NixlTransport(peer_config(0, 3))
    check_rounds(own, [start_peer(1, 3, "nixl"), start_peer(2, 3, "nixl")], rounds=30)


def test_kill_9_of_a_peer_at_work_is_said_to_whoever_writes_to_it(start_peer: StartPeer) -> None:
    peer, own = start_peer(1, 2, "nixl"), NixlTransport(peer_config(0, 2))
    join_all(own, [peer])
    peer.write("forever")
    assert peer.read() == "pushing"
    assert own.lost == ""
    peer.end()
    until(lambda: own.lost)
    fence = own.fence
    for call in (lambda: own.write_slots(1, 0, EVERYTHING[:4], EVERYTHING[:4]), lambda: own.post(1, 0, 1, 1)):
        with pytest.raises(PeerGone, match=r"PE 1: its connection is lost"):
            call()
    assert fence(1).is_quiet(), "nothing was given to it"
    own.close()


def test_a_peer_that_is_stopped_is_lost_after_its_silence(
    start_peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = replace(LOOPBACK, silent_seconds=3.0)
    peer, own = start_peer(1, 2, "nixl"), NixlTransport(replace(peer_config(0, 2), endpoint=endpoint))
    join_all(own, [peer])
    peer.write("forever")
    assert peer.read() == "pushing"
    os.kill(peer.process.pid, signal.SIGSTOP)
    slots = np.arange(8, dtype=np.int32)
    own.write_slots(1, 0, slots, slots)
    own.post(1, 0, 1, 1)
    fence = own.fence(1)
    with pytest.raises(PeerGone):
        own.quiet(1)
    until(lambda: own.lost)
    with pytest.raises(PeerGone, match=r"PE 1: its connection is lost: it has been silent for 3 s"):
        fence.is_quiet()
    own.close()  # with a write under way


def test_a_peer_that_leaves_is_lost_for_the_others_and_nothing_more_lands(pair: list[NixlTransport]) -> None:
    sender, receiver = pair
    pool = receiver.pools[0]
    sender.write_slots(1, 0, EVERYTHING, EVERYTHING)
    sender.quiet(1)
    receiver.close()
    pool.fill_(-1)  # another epoch's
    sender.pools[0].fill_(2)

    def write_again() -> bool:
        sender.write_slots(1, 0, EVERYTHING, EVERYTHING)
        sender.quiet(1)
        return False

    with pytest.raises(PeerGone):
        until(write_again)
    assert bool((pool == -1).all())


BAD_NOTES = {
    "kind": NOTE.pack(9, 0, 0, 0, 1),
    "length": b"hello",
    "row": Note(NoteKind.POST, 4).pack(1),
    "order": Note(NoteKind.POST, 0, 5).pack(2),
    "landed more than was sent": Note(NoteKind.LANDED).pack(1),
    "slot": Note(NoteKind.STAGED, SLOTS, 0, 64).pack(1),
    "bytes": Note(NoteKind.STAGED, 0, 0, 1 << 40).pack(1),
}


@dataclass(frozen=True, eq=False)
class Forged(Note):
    bad: bytes = b""

    def __init__(self, bad: bytes) -> None:
        super().__init__(NoteKind.POST)
        object.__setattr__(self, "bad", bad)

    def pack(self, number: int) -> bytes:
        return self.bad


@pytest.mark.parametrize("bad", BAD_NOTES.values(), ids=BAD_NOTES.keys())
def test_a_note_that_no_pe_sends_cuts_the_peer_off(pair: list[NixlTransport], bad: bytes) -> None:
    sender, receiver = pair
    sender._give(1, Item(note=Forged(bad)))  # by the thread that alone may talk to NIXL
    until(lambda: receiver.lost)
    assert receiver.lost.startswith("PE 0: it was cut off: ")
    assert not receiver.mailbox().any()
    assert not any(pool.any() for pool in receiver.pools)


@pytest.mark.parametrize(
    ("head", "places"),
    [
        (HEADER.pack(Kind.PAGES, 0, 0, 1), [2]),
        (HEADER.pack(Kind.SLOTS, 2, 0, 1), [2]),
        (HEADER.pack(Kind.TOKENS, 0, 2, 1), [2]),
        (HEADER.pack(Kind.SLOTS, 0, 0, 2), [2, NUM_SLOTS]),
        (HEADER.pack(Kind.TOKENS, 0, 0, 2), [-1, 2]),
    ],
)
def test_a_copy_that_no_pe_sends_is_not_sorted_in(pair: list[NixlTransport], head: bytes, places: list[int]) -> None:
    memory = pair[1]._own
    frame = head.ljust(16, b"\0") + np.array(places, "<i4").tobytes()
    memory.inbox[0, 3].numpy()[: len(frame)] = np.frombuffer(frame, np.uint8)
    with pytest.raises(TransportError):
        memory.sort_in(0, 3, 4096, memory.regions[0])
    assert not any(pool.any() for pool in pair[1].pools)


def test_notes_of_an_agent_that_is_not_of_this_epoch_are_ignored(pair: list[NixlTransport]) -> None:
    sender, receiver = pair
    remote = receiver._links[0].remote
    assert remote is not None
    remote.name += " of another epoch"
    sender.post(1, 0, 1, 1)
    until(lambda: sender._peers[1].done == 1)
    sender.quiet_seconds = 0.3
    with pytest.raises(TransportTimeout):
        sender.quiet(1)
    assert not receiver.mailbox().any()


def test_writes_wait_for_a_ring_that_is_full_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, pair: list[NixlTransport]
) -> None:
    sender, receiver = pair
    gate = Gate(monkeypatch, sender)
    sender.quiet_seconds = 0.2
    slots, (k, v) = torch.arange(3), torch.randn(2, 3, 2, 8)
    for _ in range(SLOTS):
        sender.write_tokens(1, 0, 0, k, v, torch.arange(3), slots)
    with pytest.raises(TransportTimeout, match=r"PE 1 has taken nothing for 0.2 s"):
        sender.write_tokens(1, 0, 1, k, v, torch.arange(3), slots)
    with pytest.raises(TransportTimeout, match=r"writes from PE 0 to PE 1 took more than 0.2 s"):
        sender.quiet(1)
    gate.is_open = True
    sender.quiet_seconds = 30.0
    sender.write_tokens(1, 0, 1, k, v, torch.arange(3), slots)
    sender.quiet(1)
    assert torch.equal(receiver.pools[0][0, :, 1, :, :3], torch.stack([v.transpose(0, 1)] * 2))


def listening() -> set[str]:
    """Addresses on which this process takes TCP connections."""
    table = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rsplit(":", 1)[0] for line in table.splitlines() if f"pid={os.getpid()}," in line}


def test_ucx_listens_at_the_address_of_the_endpoint_alone() -> None:
    before = listening()
    with joined():
        assert listening() - before <= {"127.0.0.1"}


def test_an_address_that_no_interface_has_is_refused() -> None:
    assert devices.interface_of("127.0.0.1") == "lo"
    with pytest.raises(TransportError, match=r"endpoint.host is 203.0.113.9; it must be the first address of lo"):
        NixlTransport(replace(config_of(0), endpoint=Endpoint("203.0.113.9"))).open()


@pytest.mark.parametrize("end", ["closed", "not joined"])
def test_close_leaves_no_thread_and_no_descriptor(end: str) -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with joined():
        pass
    before = left()
    pes = [NixlTransport(config_of(pe, 3)) for pe in range(3)]
    handles = [one.open() for one in pes]
    for one in pes if end == "closed" else pes[:1]:
        one.join(handles)
    for one in pes:
        one.close()
    until(lambda: left() == before)
