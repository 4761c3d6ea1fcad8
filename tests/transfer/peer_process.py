"""A PE in a process of its own: `python -m tests.transfer.peer_process PE NUM_PES TRANSPORT`, with lines of text.

It prints its handle, reads the others' handles, joins, and then obeys:
  rounds N    N times: fills its pools, pushes them to PE 0, posts round number and sum, waits for PE 0's answer
  forever     pushes without an end
"""

import json
import sys
import time

import numpy as np

from tandem.transfer.completion import pack_signal, unpack_signal
from tandem.transfer.factory import create_transport
from tandem.transfer.membership import TransportConfig
from tandem.transfer.transport import Transport
from tests.transfer.layouts import PAGE_SIZE, two_groups

NUM_PAGES = 32
ANSWER_SECONDS = 30.0


def peer_config(pe: int, num_pes: int) -> TransportConfig:
    return TransportConfig(pe, num_pes, two_groups(), (NUM_PAGES,) * 2, num_signals=8, island="test", epoch=3)


def pushed_slots(pe: int) -> np.ndarray:
    """Half of the receiver's pages a sender, but for the last slot, so that single slots travel as well."""
    half = NUM_PAGES // 2 * PAGE_SIZE
    return np.arange((pe - 1) * half, pe * half - 1, dtype=np.int32)


def push(transport: Transport, number: int) -> None:
    slots = pushed_slots(transport.pe)
    for group, pool in enumerate(transport.pools):
        pool.fill_(number)
        transport.write_slots(0, group, slots, slots)
    transport.quiet(0)
    transport.post(0, transport.pe, pack_signal(number, slots.size), 1000 * transport.pe + number)


def wait_for_answer(transport: Transport, number: int) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while unpack_signal(int(transport.mailbox()[0, 0]))[0] != number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer to round {number}")
        time.sleep(0.0005)


def main() -> None:
    pe, num_pes, name = sys.argv[1:]
    transport = create_transport(name, peer_config(int(pe), int(num_pes)))
    print(transport.open().decode(), flush=True)
    transport.join([json.dumps(handle).encode() for handle in json.loads(sys.stdin.readline())])
    print("joined", flush=True)
    command, *arguments = sys.stdin.readline().split() or ["stop"]
    number = 0
    while command == "forever" or (command == "rounds" and number < int(arguments[0])):
        number += 1
        push(transport, number)
        if command == "rounds":
            wait_for_answer(transport, number)
        elif number == 1:
            print("pushing", flush=True)
    transport.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main()
