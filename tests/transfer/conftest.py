from collections.abc import Iterator

import pytest

from tests.transfer.peers import Peer, StartPeer


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start(pe: int, num_pes: int, transport: str) -> Peer:
        peers.append(Peer.start(pe, num_pes, transport))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()
