"""Checks what the contract suite cannot see: real processes, what they leave, and memory that is not available."""

import gc
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.errors import MembershipRefused, PeerGone, TransportError
from tandem.transfer.shared_memory import SharedMemoryTransport
from tests.support.shm import lasting_names
from tests.transfer.peer_process import peer_config, pushed_slots
from tests.transfer.peers import StartPeer, check_rounds, join_all


def shared_objects() -> tuple[set[str], list[str], int]:
    """Returns what might leak: names in /dev/shm, own descriptors, own mappings of segments."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:tandem")
    return lasting_names(), sorted(os.listdir("/proc/self/fd")), mappings


def test_two_processes_push_to_a_third_and_every_signal_comes_after_its_data(start_peer: StartPeer) -> None:
    own = SharedMemoryTransport(peer_config(0, 3))
    check_rounds(own, [start_peer(1, 3, "shared_memory"), start_peer(2, 3, "shared_memory")], rounds=100)


def test_kill_9_of_a_peer_at_work_leaves_nothing_behind_and_the_survivor_intact(start_peer: StartPeer) -> None:
    shm_before, fds_before, mappings_before = shared_objects()
    peer = start_peer(1, 2, "shared_memory")
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


def test_joining_a_dead_process_is_refused_and_leaves_nothing_mapped(start_peer: StartPeer) -> None:
    before = shared_objects()
    peer = start_peer(1, 2, "shared_memory")
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
        ({"token": "00" * 16}, PeerGone, "belongs to another one"),
        ({"fd": 1_000_000}, PeerGone, "has ended or has closed its segment"),
        ({"fd": 0}, PeerGone, "belongs to another one"),
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
    layout = KVLayout((LayerGroup((0,), KV(8, 128)),), 16, torch.float32)
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
