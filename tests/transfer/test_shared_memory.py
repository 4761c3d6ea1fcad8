"""What the contract suite cannot see: real processes, what they leave behind, memory that cannot be had."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.transfer.completion import pack_signal
from tandem.transfer.errors import MembershipRefused, PeerGone, TransportError
from tandem.transfer.shared_memory import SharedMemoryTransport
from tests.support.shm import lasting_names
from tests.transfer.layouts import PAGE_SIZE
from tests.transfer.peer_process import NUM_PAGES, peer_config, pushed_slots

ROOT = Path(__file__).parents[2]


@dataclass
class Peer:
    """The test's end of a peer process."""

    process: subprocess.Popen[str]

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def start_peer() -> Iterator[Callable[[int, int], Peer]]:
    peers: list[Peer] = []

    def start(pe: int, num_pes: int) -> Peer:
        peers.append(
            Peer(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.transfer.peer_process", str(pe), str(num_pes)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                )
            )
        )
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


def join_all(own: SharedMemoryTransport, peers: list[Peer]) -> None:
    handles = [own.open(), *(peer.read().encode() for peer in peers)]
    for peer in peers:
        peer.write(json.dumps([json.loads(handle) for handle in handles]))
    own.join(handles)
    for peer in peers:
        assert peer.read() == "joined"


def shared_objects() -> tuple[set[str], list[str], int]:
    """What might leak: names in /dev/shm, own descriptors, own mappings of segments."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:tandem")
    return lasting_names(), sorted(os.listdir("/proc/self/fd")), mappings


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing came within 30 s"
        time.sleep(0.0005)


def test_two_processes_push_to_a_third_and_every_signal_comes_after_its_data(
    start_peer: Callable[[int, int], Peer],
) -> None:
    rounds = 100
    own = SharedMemoryTransport(peer_config(0, 3))
    peers = [start_peer(1, 3), start_peer(2, 3)]
    join_all(own, peers)
    for peer in peers:
        peer.write(f"rounds {rounds}")
    for number in range(1, rounds + 1):
        for pe in (1, 2):
            slots = pushed_slots(pe)
            word = pack_signal(number, slots.size)
            wait_until(lambda pe=pe, word=word: int(own.mailbox()[pe, 0]) == word)
            assert int(own.mailbox()[pe, 1]) == 1000 * pe + number
            for pool in own.pools:
                pages = pool[(pe - 1) * NUM_PAGES // 2 : pe * NUM_PAGES // 2]
                assert bool((pages[:-1] == number).all())
                assert bool((pages[-1, ..., : PAGE_SIZE - 1, :] == number).all())
                assert not pages[-1, ..., PAGE_SIZE - 1, :].any()
        for pe in (1, 2):
            own.post(pe, 0, pack_signal(number, 0), 0)
    assert [peer.read() for peer in peers] == ["closed", "closed"]
    own.close()


def test_kill_9_of_a_peer_at_work_leaves_nothing_behind_and_the_survivor_intact(
    start_peer: Callable[[int, int], Peer],
) -> None:
    shm_before, fds_before, mappings_before = shared_objects()
    peer = start_peer(1, 2)
    own = SharedMemoryTransport(peer_config(0, 2))
    join_all(own, [peer])
    peer.write("forever")
    assert peer.read() == "pushing"
    os.kill(peer.process.pid, signal.SIGKILL)
    peer.process.communicate(timeout=20)

    number = float(own.pools[0][0, 0, 0, 0, 0, 0])
    assert number >= 1
    slots = pushed_slots(1)
    own.write_slots(1, 0, slots, slots)
    own.quiet(1)
    own.post(1, 0, 1, 1)
    own.close()
    assert shared_objects() == (shm_before, fds_before, mappings_before)


def test_joining_a_dead_process_is_refused_and_leaves_nothing_mapped(start_peer: Callable[[int, int], Peer]) -> None:
    before = shared_objects()
    peer = start_peer(1, 2)
    handle = peer.read().encode()
    peer.end()
    own = SharedMemoryTransport(peer_config(0, 2))
    own_handle = own.open()
    with pytest.raises(PeerGone, match=f"PE 1: process {peer.process.pid} has ended"):
        own.join([own_handle, handle])
    own.close()
    assert shared_objects() == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token": "00" * 16}, PeerGone, "is another one by now"),
        ({"fd": 1_000_000}, PeerGone, "has ended or has closed its segment"),
        ({"fd": 0}, PeerGone, "is another one by now"),
        ({"fd": "0"}, TransportError, "it must have pid, fd and token"),
    ],
)
def test_a_reused_pid_or_descriptor_is_noticed(change: dict[str, object], error: type[Exception], message: str) -> None:
    transports = [SharedMemoryTransport(peer_config(pe, 2)) for pe in range(2)]
    handles = [transport.open() for transport in transports]
    handle = json.loads(handles[1])
    handle["detail"] |= change
    with pytest.raises(error, match=message):
        transports[0].join([handles[0], json.dumps(handle).encode()])
    transports[0].join(handles)
    for transport in transports:
        transport.close()


def test_pools_outlive_close_in_the_hands_of_their_users() -> None:
    before = shared_objects()
    transport = SharedMemoryTransport(peer_config(0, 1))
    transport.join([transport.open()])
    pool = transport.pools[0]
    transport.close()
    pool.fill_(2)
    assert bool((pool == 2).all())
    del pool
    assert shared_objects() == before


def test_memory_that_the_machine_does_not_have_is_refused() -> None:
    layout = KVLayout((LayerGroup((0,), 8, 128),), 16, torch.float32)
    config = replace(peer_config(0, 1), layout=layout, num_pages=(2**40,))
    before = shared_objects()
    with pytest.raises(TransportError, match=rf"num_pages \({2**40},\) needs a segment of"):
        SharedMemoryTransport(config).open()
    assert shared_objects() == before


def test_a_segment_cannot_be_shrunk_by_a_peer() -> None:
    transport = SharedMemoryTransport(peer_config(0, 1))
    detail = json.loads(transport.open())["detail"]
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{detail['fd']}", 0)
    transport.close()


def test_open_is_called_once() -> None:
    transport = SharedMemoryTransport(peer_config(0, 1))
    transport.open()
    with pytest.raises(TransportError, match="open already"):
        transport.open()
    transport.close()


def test_a_failed_join_can_be_tried_again() -> None:
    transport = SharedMemoryTransport(peer_config(0, 1))
    handle = transport.open()
    with pytest.raises(MembershipRefused):
        transport.join([])
    transport.join([handle])
    assert not transport.pools[0].any()
    transport.close()
