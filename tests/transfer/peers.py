"""PEs in processes of their own, at the test's end."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.transfer.completion import pack_signal
from tandem.transfer.transport import Transport
from tests.support.waiting import until
from tests.transfer.layouts import PAGE_SIZE
from tests.transfer.peer_process import NUM_PAGES, pushed_slots

ROOT = Path(__file__).parents[2]


@dataclass
class Peer:
    """The test's end of a peer process."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, pe: int, num_pes: int, transport: str) -> "Peer":
        command = [sys.executable, "-m", "tests.transfer.peer_process", str(pe), str(num_pes), transport]
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))

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


StartPeer = Callable[[int, int, str], Peer]
"""Starts PE i of n with a transport. See the fixture start_peer."""


def join_all(own: Transport, peers: list[Peer]) -> None:
    handles = [own.open(), *(peer.read().encode() for peer in peers)]
    for peer in peers:
        peer.write(json.dumps([json.loads(handle) for handle in handles]))
    own.join(handles)
    for peer in peers:
        assert peer.read() == "joined"


def check_rounds(own: Transport, peers: list[Peer], rounds: int) -> None:
    """Both peers fill PE 0's pools, and at each signal all of them must be there. Closes all."""
    join_all(own, peers)
    for peer in peers:
        peer.write(f"rounds {rounds}")
    for number in range(1, rounds + 1):
        for pe in (1, 2):
            slots = pushed_slots(pe)
            word = pack_signal(number, slots.size)
            until(lambda pe=pe, word=word: int(own.mailbox()[pe, 0]) == word)
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
